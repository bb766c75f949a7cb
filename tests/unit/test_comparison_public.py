"""`compare` on small trainings as of public scripts: each fault is placed, no harmless change is told as a difference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import public_trainings
import pytest
import torch
from kernels import OtherKernels
from pairs import slow
from public_trainings import FAULTS, HARMLESS, PACK, TRAININGS, Recording, Trial, noisy
from small import sgd

import gradsurgeon
from gradsurgeon.cli import main

pytestmark = pytest.mark.slow

Make = Callable[..., Path]
# Autocast rounds more than float32 does, and no run tells that it used autocast.
UNKNOWN = Trial("mixed", "fused attention")
QUICK = {
    "one product for q, k and v",
    "sigmoid by a method",
    "one backward pass of both losses",
    "another rate of the discriminator",
    "another activation of the generator",
    "discriminator not recorded",
    "state not kept",
}


@contextlib.contextmanager
def _way(how: str) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with OtherKernels() if how == "other kernels" else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that records a training with a change once, and returns its directory."""
    folder, known = tmp_path_factory.mktemp("public"), dict[tuple[str, str, int], Path]()

    def make(training: str, how: str = "", seed: int = -1) -> Path:
        key = (training, how, seed)
        if key not in known:
            known[key] = folder / f"run-{len(known)}"
            eps = 4e-3 if training == "mixed" else 1e-6
            rules = noisy(seed, eps) if seed >= 0 else PACK
            torch.manual_seed(0)
            with _way(how):
                TRAININGS[training](Recording(known[key], how, rules))
        return known[key]

    return make


def compared(made: Make, trial: Trial, *, noise: bool) -> gradsurgeon.Comparison:
    runs = [made(trial.training, seed=seed) for seed in range(3)] if noise else []
    return gradsurgeon.compare(made(trial.training, trial.how), made(trial.training), runs)


def named(trials: tuple[Trial, ...]) -> list[Any]:
    quick = [trial for trial in trials if trial.how in QUICK]
    return [*quick, *slow(*[trial for trial in trials if trial.how not in QUICK])]


@pytest.mark.parametrize("noise", [False, *slow(True)], ids=["alone", "noise"])
class TestTrial:
    @pytest.mark.parametrize("trial", named(HARMLESS), ids=lambda one: f"{one[0]}-{one[1]}")
    def test_harmless_changes_agree(self, made: Make, trial: Trial, noise: bool) -> None:
        found = compared(made, trial, noise=noise)
        if trial == UNKNOWN and not noise:
            assert "; under autocast this may be rounding, which noise runs would" in str(found)
        else:
            assert found.alike, found

    @pytest.mark.parametrize("trial", named(FAULTS), ids=lambda one: f"{one[0]}-{one[1]}")
    def test_faults_are_placed(self, made: Make, trial: Trial, noise: bool) -> None:
        found = compared(made, trial, noise=noise)
        assert not found.alike
        *model, phase, text = ("", *trial.place)
        if phase:
            assert (found.model, found.phase) == (model[-1], phase)
            assert found.first[0].text.startswith(text)
        else:
            assert text in found.only_reference


class TestModels:
    def test_each_model_is_told(self, made: Make, capsys: pytest.CaptureFixture[str]) -> None:
        run = made("pictures", "another rate of the discriminator")
        assert main(["compare", str(run), str(made("pictures"))]) == 1
        first, _, second, *_ = capsys.readouterr().out.splitlines()
        place = "step 0, update: weight 0.weight after the update"
        assert first.startswith(f"Discriminator: They part at {place}")
        assert second.startswith("Generator: They part at step 0, backward: ")
        found = gradsurgeon.compare(run, made("pictures"))
        (form,) = found.to_dict()["others"]
        assert (form["model"], form["alike"]) == ("Generator", False)

    def test_models_that_agree(self, made: Make) -> None:
        found = gradsurgeon.compare(made("pictures"), made("pictures"))
        lines = str(found).splitlines()
        assert (found.alike, found.model) == (True, "Generator")
        assert lines[0].startswith("Generator: They are equal bit for bit in ")
        assert lines[2].startswith("Discriminator: They are equal bit for bit in ")

    @pytest.mark.parametrize("is_run", [True, False])
    def test_a_model_of_one_run(self, made: Make, is_run: bool) -> None:
        runs = [made("pictures", "discriminator not recorded"), made("pictures")]
        found = gradsurgeon.compare(*(runs if is_run else runs[::-1]))
        where = "reference" if is_run else "run"
        assert not found.alike
        assert f"\nonly in the {where}: model Discriminator\n" in str(found)
        assert found.first == ()

    def test_a_folder_that_a_person_made_is_no_model(self, made: Make, tmp_path: Path) -> None:
        public_trainings.codes(Recording(tmp_path / "a"))
        torch.manual_seed(0)
        public_trainings.codes(Recording(tmp_path / "a" / "noise", rules=noisy(0, 1e-6)))
        assert gradsurgeon.compare(made("codes"), tmp_path / "a").alike


class TestOneRunOnly:
    """What one run alone has is told, and no border."""

    def test_a_module_that_is_not_called(self, made: Make) -> None:
        found = gradsurgeon.compare(
            made("language", "one product for q, k and v"), made("language")
        )
        assert (found.alike, found.first) == (True, ())
        said = "note: only in the reference, so not compared: input of h.1.attn.q, "
        assert said in " ".join(str(found).split())
        again = gradsurgeon.compare(
            made("language"), made("language", "one product for q, k and v")
        )
        assert "only in the run, so not compared: input of h.1.attn.q, " in again.notes[0]

    def test_a_gradient_of_one_call_that_is_missing(self, tmp_path: Path) -> None:
        runs = [branches(tmp_path / name, detached=name == "b", twice=True) for name in "ba"]
        found = gradsurgeon.compare(*runs)
        assert found.phase == "backward"
        assert found.first[0].text.startswith("output gradient of left (call ")

    def test_a_gradient_of_zeros_is_like_none(self, tmp_path: Path) -> None:
        runs = [branches(tmp_path / name, detached=name == "b", weight=0.0) for name in "ba"]
        assert gradsurgeon.compare(*runs).alike


class Branches(torch.nn.Module):
    """Two branches, or one that is called twice; the second can be detached."""

    def __init__(self, *, detached: bool, twice: bool, weight: float) -> None:
        super().__init__()
        self.detached, self.weight = detached, weight
        self.left, self.right, self.head = (torch.nn.Linear(8, 8) for _ in range(3))
        self.second = self.left if twice else self.right

    def forward(self, x: torch.Tensor) -> Any:
        first, second = self.left(x), self.second(-x)
        if self.detached:
            second = second.detach()
        return self.head(first + self.weight * second)


def branches(path: Path, *, detached: bool, twice: bool = False, weight: float = 1.0) -> Path:
    torch.manual_seed(0)
    model = Branches(detached=detached, twice=twice, weight=weight)
    optimizer = sgd(model)
    with gradsurgeon.apply(model, PACK, optimizer=optimizer, record=path):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    return path
