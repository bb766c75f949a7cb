"""What `compare` makes of noise runs, dtypes, calls and kinds of tensors that do not fit: small trainings."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import comparison_trainings as parting
import pytest
import torch
from comparison_nets import Transformer
from ranks import Json
from small import sgd
from torch import nn

import gradsurgeon
from gradsurgeon import RecordError
from gradsurgeon.cli import main

pytestmark = pytest.mark.slow

FAULTS = {fault.name: fault for fault in parting.FAULTS}
SCALED = FAULTS["attention scaled by 1/d"].change
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that records a training once, and returns its directory."""
    folder, known = tmp_path_factory.mktemp("runs"), dict[str, Path]()

    def make(name: str, change: Any = None, kind: Any = Transformer, **options: Any) -> Any:
        eps = options.pop("eps", parting.EPS)
        if name not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parting, "EPS", eps)
                known[name] = parting.train(folder / name, kind, 0, change, **options)
        return known[name]

    return make


class TestRefused:
    @pytest.mark.parametrize(
        ("fault", "place"),
        [
            ("attention scaled by 1/d", "input of h.1.attn.o"),
            ("circular padding", "output of blocks.1.conv2"),
        ],
    )
    def test_the_script_of_the_candidate(self, made: Make, fault: str, place: str) -> None:
        _, kind, change, _ = FAULTS[fault]
        reference, run = made(kind.__name__, kind=kind), made(fault, change, kind)
        noise = [made(f"{fault}{seed}", change, kind, noise=seed) for seed in (1, 2, 3)]
        with pytest.raises(RecordError) as error:
            gradsurgeon.compare(run, reference, noise)
        text = str(error.value)
        assert f"at the {place} in step 0" in text
        assert "by the script of the reference" in text
        assert main(["compare", str(run), str(reference), "--noise", *map(str, noise)]) == 2

    def test_the_candidate_itself(self, made: Make, tmp_path: Path) -> None:
        reference, run = made("Transformer"), made("attention scaled by 1/d", SCALED)
        with pytest.raises(RecordError, match=r"is the run or .*; give each noise run once"):
            gradsurgeon.compare(run, reference, run)
        again = made("scaled again", SCALED)
        with pytest.raises(RecordError, match="more than rounding"):
            gradsurgeon.compare(run, reference, again)
        with pytest.raises(RecordError, match="or the reference"):
            gradsurgeon.compare(run, reference, reference)
        noise = made("noise", noise=1)
        link = tmp_path / "link"
        link.symlink_to(noise)
        with pytest.raises(RecordError, match="given twice"):
            gradsurgeon.compare(run, reference, [noise, link])

    def test_what_rounding_decides_is_not(self, tmp_path: Path) -> None:
        # The batch norm takes away what is large and common in its input, so noise is most of its output.
        shaken = {"action": "perturb", "modules": "*", "tensor": "input", "eps": 4e-3}
        noise = [
            small(tmp_path / f"{seed}", shift=100.0, rules={
                "version": 1,
                "include": [parting.PACK],
                "rules": [{"id": "n", "seed": seed, **shaken}],
            })
            for seed in (1, 2, 3)
        ]  # fmt: skip
        run, reference = (small(tmp_path / name, shift=100.0) for name in "ba")
        assert gradsurgeon.compare(run, reference, noise).tolerance.kind.endswith("noise")
        with pytest.raises(RecordError, match=r"more than rounding"):
            gradsurgeon.compare(run, reference, noise[0])

    def test_no_tensor_in_common(self, made: Make, tmp_path: Path) -> None:
        noise, runs = small(tmp_path / "noise"), (made("again"), made("Transformer"))
        with pytest.raises(RecordError, match=r"in common: give noise runs of the reference"):
            gradsurgeon.compare(*runs, noise)

    def test_noise_that_is_non_finite(self, made: Make) -> None:
        def spoil(training: Any) -> None:
            training.model.h[1].ln2.register_forward_hook(lambda *given: given[2] * float("nan"))

        noise = made("faulty noise", spoil, noise=1)
        with pytest.raises(RecordError, match=r"by inf at the output of h\.1\.ln2 in st"):
            gradsurgeon.compare(made("again"), made("Transformer"), noise)


def small(path: Path, **options: Any) -> Path:
    """Record a small training.

    Args:
        path: where to record.
        options: `rules`; `clip`, the largest norm; `evaluated`, before which step the model runs once more;
            `shift`, the mean of the data; `loss`.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = sgd(model)
    rules = options.get("rules", parting.PACK)
    data = torch.randn(3, 8, 4) + options.get("shift", 0.0)
    with gradsurgeon.apply(model, rules, optimizer=optimizer, record=path):
        for step, x in enumerate(data):
            if step == options.get("evaluated"):
                model.eval()
                model(data[2] * 3)
                model.train()
            options.get("loss", lambda y: y.square().mean())(model(x)).backward()
            if "clip" in options:
                nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
            optimizer.step()
            optimizer.zero_grad()
    return path


def log(id_: str, **more: Any) -> Json:
    stats = ["l2", "numel", "projection"]
    return {"id": id_, "action": "norm-log", "params": "*", "stats": stats, **more}


WEIGHTS = {"version": 1, "rules": [log("weights", tensor="value")]}
FINAL = {
    "version": 1,
    "rules": [log("gradients"), log("final", at="step"), log("weights", tensor="value")],
}


class TestVerdict:
    def test_rounding_decides_every_tensor(self, tmp_path: Path) -> None:
        # The batch norm cancels this bias: rounding alone decides its gradient.
        bias = {**log("gradients"), "params": ["0.bias"]}
        undecided = {"version": 1, "rules": [bias]}
        run, reference = (small(tmp_path / name, rules=undecided) for name in "ba")
        perturb = {"id": "n", "action": "perturb", "modules": "*", "tensor": "input", "eps": 1e-4}
        noise = small(tmp_path / "noise", rules={"version": 1, "rules": [bias, perturb]})
        found = gradsurgeon.compare(run, reference, noise)
        assert (found.alike, found.largest, found.first) == (False, None, ())
        assert "Nothing can be said" in str(found)
        assert found.to_dict()["alike"] is False
        assert main(["compare", str(run), str(reference), "--noise", str(noise)]) == 2

    def test_it_says_what_rounding_decides(self, made: Make) -> None:
        noise = [made(f"noise{seed}", noise=seed) for seed in (1, 2, 3)]
        found = gradsurgeon.compare(made("again"), made("Transformer"), noise)
        number = len(found.undecided)
        assert number
        assert f"rounding decides {number} tensors, not judged: " in str(found)

    def test_without_noise_runs(self, made: Make) -> None:
        run = made("tanh", FAULTS["GELU by tanh"].change)
        verdict = str(gradsurgeon.compare(run, made("Transformer"))).splitlines()[0]
        assert verdict.startswith("They part at step 0, forward: ")
        assert verdict.endswith("; this may be rounding, which noise runs would tell.")
        assert main(["compare", str(run), str(made("Transformer"))]) == 1
        run = made("attention scaled by 1/d", SCALED)
        verdict = str(gradsurgeon.compare(run, made("Transformer"))).splitlines()[0]
        assert verdict == "They part at step 0, forward: input of h.1.attn.o."


def half(training: Any) -> None:
    training.model.bfloat16()


class TestHalfPrecision:
    def test_a_harmless_change(self, made: Make) -> None:
        def both(training: Any) -> None:
            half(training)
            parting.HARMLESS["fused attention"](training)

        run, reference = made("half fused", both), made("half", half)
        noise = [made(f"half gross {seed}", half, noise=seed, eps=4e-3) for seed in (1, 2, 3)]
        assert gradsurgeon.compare(run, reference, noise).alike
        # Smaller noise cannot show that rounding alone decides the gradients of key biases.
        noise = [made(f"half {seed}", half, noise=seed) for seed in (1, 2, 3)]
        found = gradsurgeon.compare(run, reference, noise)
        assert found.phase in {"gradient", "update"}
        assert "this may be rounding" in str(found).splitlines()[0]

    def test_noise_that_rounds_away(self, made: Make) -> None:
        noise = [made(f"half {seed}", half, noise=seed) for seed in (1, 2, 3)]
        found = gradsurgeon.compare(made("half again", half), made("half", half), noise)
        assert "noise of this size rounds away" in found.tolerance.text
        assert "`gradsurgeon run --perturb 4e-3 --seed N`" in found.tolerance.text

    def test_each_parameter_has_the_tolerance_of_its_dtype(self, made: Make) -> None:
        def mixed(training: Any) -> None:
            training.model.h[1].mlp.out.weight.data = training.model.h[1].mlp.out.weight.bfloat16()

        def cast(training: Any) -> None:
            mixed(training)
            out = training.model.h[1].mlp.out
            out.forward = lambda x: nn.functional.linear(x, out.weight.float(), out.bias)

        noise = [made(f"cast {seed}", cast, noise=seed) for seed in (1, 2, 3)]
        found = gradsurgeon.compare(made("cast again", cast), made("cast", cast), noise)
        meta = json.loads((made("cast") / "run.json").read_text())
        dtypes = {one["name"]: one.get("dtype") for one in meta["model"]["params"]}
        assert dtypes["h.1.mlp.out.weight"] == "bfloat16"
        assert dtypes["emb.weight"] == "float32"
        floors = {pair.text: pair.floor for pair in found.pairs}
        assert floors["gradient of h.1.mlp.out.weight"] == 8 * 2**-7
        assert floors["gradient of emb.weight"] == 8 * 2**-23
        assert floors["output of h.0.ln1"] == 8 * 2**-7


class TestCalls:
    @pytest.mark.parametrize("step", [0, 1])
    def test_an_evaluation_in_one_run_alone(self, tmp_path: Path, step: int) -> None:
        run, reference = small(tmp_path / "b", evaluated=step), small(tmp_path / "a")
        found = gradsurgeon.compare(run, reference)
        assert found.alike, found
        (note,) = found.notes
        assert note.startswith(f"not compared in step {step}: 0, 1, 2, called another number of ")
        phases = {(pair.step, pair.phase) for pair in found.pairs}
        steps = {0, 1, 2}
        assert {at for at in steps if (at, "forward") in phases} == steps - {step}
        assert {at for at in steps if (at, "backward") in phases} == steps


class TestKinds:
    def test_weights_alone(self, tmp_path: Path) -> None:
        run, reference = small(tmp_path / "b", rules=WEIGHTS), small(tmp_path / "a")
        found = gradsurgeon.compare(run, reference)
        (note,) = found.notes
        assert (found.alike, note.startswith("not in all runs, so not compared: ")) == (True, True)
        assert "input at forward, output at forward, output.grad at backward" in note
        assert gradsurgeon.compare(reference, run).notes == found.notes

    def test_a_clip_that_is_missing(self, tmp_path: Path) -> None:
        run = small(tmp_path / "b", rules=FINAL)
        reference = small(tmp_path / "a", rules=FINAL, clip=0.01)
        found = gradsurgeon.compare(run, reference)
        assert (found.step, found.phase) == (0, "gradient")
        assert {one.text.partition(" of ")[0] for one in found.first} == {"final gradient"}
        order = [pair.kind for pair in found.pairs if pair.step == 0]
        changes = [other for one, other in pairwise(order) if one != other]
        assert [(kind.tensor, kind.point) for kind in (order[0], *changes)] == [
            ("grad", "accumulated"), ("grad", "step"), ("value", "updated"),
        ]  # fmt: skip
