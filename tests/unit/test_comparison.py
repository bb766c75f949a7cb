"""Two runs compared: small trainings with a fault or a harmless change, and what `compare` says of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comparison_trainings as parting
import pytest
import torch
from comparison_nets import Convolutions, Transformer
from kernels import OtherKernels
from pairs import slow
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import Comparison, RecordError, RuleFileError
from gradsurgeon.report.comparison import tolerance

pytestmark = pytest.mark.slow

FAULTS = {fault.name: fault for fault in parting.FAULTS}
ALIKE = list(parting.HARMLESS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that records a training of the transformer once, and returns its directory."""
    folder, known = tmp_path_factory.mktemp("runs"), dict[str, Path]()

    def make(
        name: str, change: Any = None, kind: type[nn.Module] = Transformer, **options: Any
    ) -> Any:
        if name not in known:
            change = change or parting.HARMLESS.get(name)
            known[name] = parting.train(folder / name, kind, 0, change, **options)
        return known[name]

    return make


@pytest.fixture(scope="module")
def reference(made: Any) -> Any:
    return made("reference")


@pytest.fixture(scope="module")
def noise(made: Any) -> list[Path]:
    return [made(f"noise{seed}", noise=seed) for seed in (1, 2, 3)]


def fault(name: str) -> Any:
    return FAULTS[name].change


def first_lines(found: Comparison) -> str:
    """Return the lines that a reader sees without scrolling."""
    return "\n".join(str(found).splitlines()[:12])


class Pairwise(nn.Module):
    """A block that takes two tensors and gives two, as layers of attention do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first, self.last = 1.0, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh() * gate * self.scale
        return self.last(hidden) + x, hidden


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(768, 8), nn.Linear(8, 10)
        self.blocks = nn.ModuleList([Pairwise(), Pairwise()])

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x.flatten(1))
        gate = x.sigmoid()
        for block in self.blocks:
            x, gate = block(x, gate)
        return self.head(x)


class TestBorder:
    def test_a_module_that_takes_and_gives_several_tensors(self, made: Any) -> None:
        reference = made("gated", kind=Gated)
        noise = [made(f"gated{seed}", kind=Gated, noise=seed) for seed in (1, 2, 3)]
        slip = parting._attribute("blocks.1", scale=0.9)  # as the faults are made
        found = gradsurgeon.compare(made("gate", slip, Gated), reference, noise)
        assert (found.phase, found.inside) == ("forward", "blocks.1")
        assert found.first[0].text == "input of blocks.1.last"
        assert [module.name for module in found.modules] == ["blocks.1"]
        assert "output of blocks.1 (output[1])" in [one.text for one in found.first]
        assert gradsurgeon.compare(noise[0], reference, noise[1:]).alike

    def test_the_module_around_the_fault(self, made: Any, reference: Any, noise: Any) -> None:
        found = gradsurgeon.compare(
            made("scaled", fault("attention scaled by 1/d")), reference, noise
        )
        assert (found.alike, found.step, found.phase) == (False, 0, "forward")
        assert found.inside == "h.1.attn"
        assert found.first[0].text == "input of h.1.attn.o"
        assert found.first[0].distance > 1000 * found.first[0].tolerance > 0
        assert [one.distance <= one.tolerance for one in found.last] == [True] * 3
        assert [module.name for module in found.modules] == ["h.1.attn"]
        assert found.modules[0].came_in < 1e-6
        assert found.modules[0].went_out > 1e-2
        assert "They part at step 0, forward: input of h.1.attn.o.\n" in str(found)
        said = "step 0, forward: the input of h.1.attn agrees, the input of h.1.attn.o does not: "
        assert said in first_lines(found)
        assert [step.step for step in found.steps] == [0, 1, 2]
        assert found.steps[0].apart < found.steps[1].apart <= found.steps[1].compared

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("detach in the MLP", "the output gradient of h.1.mlp.out agrees"),
            (
                "learning rate 1% higher",
                "the final gradient of emb.weight agrees, the weight emb.weight after",
            ),
            # The input of an embedding is whole numbers, which are not compared.
            ("positions shifted by one", "the output of emb agrees, the output of pos does not: "),
            ("head not tied", "only in the run: head.weight"),
        ],
    )
    def test_the_first_lines_say_what_still_agrees(
        self, made: Any, reference: Any, noise: Any, name: str, said: str
    ) -> None:
        found = gradsurgeon.compare(made(name, fault(name)), reference, noise)
        assert found.first[0].text == FAULTS[name].place
        assert said in first_lines(found)

    @pytest.mark.slow
    def test_nan_or_nothing_on_one_side(self, made: Any, reference: Any, noise: Any) -> None:
        def spoil(training: Any) -> None:
            training.model.h[1].ln2.register_forward_hook(lambda *given: given[2] * float("nan"))

        changed = made("nan", spoil)
        found = gradsurgeon.compare(changed, reference, noise)
        assert found.first[0].why == "non-finite in the run"
        said = "the input of h.1.ln2 agrees, the output of h.1.ln2 does not: non-finite"
        assert said in first_lines(found)
        assert gradsurgeon.compare(changed, changed).alike
        detached = made("detach in the MLP", fault("detach in the MLP"))
        assert gradsurgeon.compare(detached, reference).first[0].why == "missing in the run"
        again = gradsurgeon.compare(reference, detached)
        assert again.first[0].why == "missing in the reference"

    def test_calls_of_one_module_in_the_backward_pass(self, made: Any) -> None:
        def scale(training: Any) -> None:
            training.model.blocks[1].bn2.register_forward_hook(
                lambda *given: given[2].register_hook(lambda grad: grad * 1.1) and None
            )

        reference = made("images", kind=Convolutions)
        found = gradsurgeon.compare(made("steeper", scale, Convolutions), reference)
        assert found.last[-1].text == "output gradient of blocks.1.relu (call 2 of 2)"
        texts = ["blocks.1.bn2", "blocks.1.conv2", "blocks.1.relu (call 1 of 2)"]
        assert [one.text for one in found.first[:3]] == [
            f"output gradient of {one}" for one in texts
        ]


class TestAlike:
    def test_bit_for_bit(self, made: Any, reference: Any) -> None:
        found = gradsurgeon.compare(made("again"), reference)
        assert (found.alike, found.tolerance.kind) == (True, "rounding")
        assert str(found).startswith("They are equal bit for bit in ")
        useless = gradsurgeon.compare(made("again"), reference, made("third"))
        assert "noise runs equal the reference bit for bit" in " ".join(str(useless).split())

    @pytest.mark.slow
    def test_gross_noise(self, made: Any, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parting, "EPS", 2.0**-8)
        gross = [made(f"gross{seed}", noise=seed) for seed in (1, 2, 3)]
        found = gradsurgeon.compare(
            made("scaled", fault("attention scaled by 1/d")), reference, gross
        )
        assert (found.tolerance.kind, found.tolerance.times) == ("gross-noise", 4)
        assert "only gross faults can be told" in found.tolerance.text
        faster = parting._fields(lr=1.5e-3)  # as the faults are made
        found = gradsurgeon.compare(made("faster", faster), reference, gross)
        assert (found.step, found.phase) == (0, "update")


class TestWithoutNoise:
    """The rounding of the dtype is allowed, and grows with depth."""

    @pytest.mark.parametrize("change", [ALIKE[-1], *slow(*ALIKE[:-1])])
    def test_harmless_changes(self, made: Any, reference: Any, change: str) -> None:
        found = gradsurgeon.compare(made(change, parting.HARMLESS[change]), reference)
        assert found.alike, found
        assert "tolerance: the rounding of float32, 7.6e-06, which grows with depth" in str(found)

    @pytest.mark.parametrize("name", ["learning rate 1% higher", *slow(*FAULTS)])
    @pytest.mark.parametrize("kernels", ["the same", *slow("other")])
    def test_faults(self, made: Any, reference: Any, name: str, kernels: str) -> None:
        one = FAULTS[name]
        against = reference if one.model is Transformer else made("images", kind=Convolutions)
        with OtherKernels() if kernels == "other" else contextlib.nullcontext():
            run = made(f"{name} {kernels}", one.change, one.model)
        assert gradsurgeon.compare(run, against).first[0].text == one.place

    def test_half_precision_rounds_more(self) -> None:
        least = [tolerance.by_rounding(dtype).least for dtype in ("float32", "bfloat16")]
        assert least == [64 * 2**-23, 2**-7]


class Wrapper(nn.Module):
    """What DistributedDataParallel does with names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class Renamed(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.words, self.places, self.blocks = model.emb, model.pos, model.h
        self.norm, self.out = model.ln, model.head

    def forward(self, x: Tensor) -> Any:
        y = self.words(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            y = block(y)
        return self.out(self.norm(y))


def renamed(training: Any) -> None:
    training.model = Renamed(training.model)


MAP = {"emb": "words", "pos": "places", "h": "blocks", "ln": "norm", "head": "out"}


class TestAlignment:
    def test_wrappers(self, made: Any, reference: Any, noise: Any) -> None:
        def wrap(training: Any) -> None:
            training.model.h[1] = Wrapper(training.model.h[1])
            training.model = Wrapper(training.model)

        found = gradsurgeon.compare(made("wrapped", wrap), reference, noise)
        assert found.alike, found
        assert found.only_run == found.only_reference == ()
        assert found.steps[0].compared > 200

    @pytest.mark.slow
    def test_micro_batches(self, made: Any, reference: Any, noise: Any) -> None:
        halves = made("halves", parts=2)
        found = gradsurgeon.compare(halves, reference, noise)
        assert found.alike, found
        assert {kind.phase for kind in kinds_of(found)} == {"gradient", "update"}
        assert "only gradients and weights are compared: other ranks, batches or micro" in str(
            found
        )
        same = gradsurgeon.compare(halves, halves)
        assert {kind.phase for kind in kinds_of(same)} > {"forward"}
        assert {pair.micro_batch for pair in same.pairs} == {0, 1}

    @pytest.mark.slow
    def test_a_fault_in_the_second_micro_batch(self, made: Any) -> None:
        def late(training: Any) -> None:
            calls = iter(range(100))
            training.model.h[1].ln1.register_forward_hook(
                lambda *given: given[2] * 2 if next(calls) == 3 else None
            )

        found = gradsurgeon.compare(made("late", late, parts=2), made("halves", parts=2))
        assert (found.step, found.first[0].text) == (1, "output of h.1.ln1 (micro-batch 2 of 2)")
        assert "the input of h.1.ln1 agrees" in first_lines(found)

    @pytest.mark.slow
    def test_names_that_changed(self, made: Any, reference: Any, noise: Any, tmp_path: Any) -> None:
        run = made("renamed", renamed)
        with pytest.raises(RecordError, match="no name of a tensor in common"):
            gradsurgeon.compare(copied(run, tmp_path, only_params("words.weight")), reference)
        file = tmp_path / "names.yaml"
        file.write_text("".join(f"{old}: {new}\n" for old, new in MAP.items()))
        for given in (file, str(file), MAP):
            found = gradsurgeon.compare(run, reference, noise, given)
            assert found.alike, found
            assert (found.only_run, found.steps[0].compared > 200) == ((), True)
        without = gradsurgeon.compare(run, reference, noise, {"h": "blocks"})
        assert not without.alike
        assert "but have other parameters" in str(without).splitlines()[0]
        assert {"words.weight", "out"} <= {*without.only_run}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("- h", "names.yaml:1:1: error: the file has no names"),
            ("h: blocks\nemb: [words]", "names.yaml:2:6: error: the new name of `emb` is no text"),
            (
                "emb: words\nhh: blocks",
                "names.yaml:2:1: error: the reference has no name that is `hh`",
            ),
            ("h: block", "names.yaml:1:1: error: the run has no name that is `block`"),
        ],
    )
    def test_names_that_are_wrong(
        self, made: Any, reference: Any, tmp_path: Any, text: str, said: str
    ) -> None:
        file = tmp_path / "names.yaml"
        file.write_text(text)
        with pytest.raises(RuleFileError) as error:
            gradsurgeon.compare(made("renamed", renamed), reference, (), file)
        assert said in str(error.value)


def kinds_of(found: Comparison) -> list[Any]:
    return [pair.kind for pair in found.pairs]


def copied(run: Path, folder: Path, change: Any) -> Path:
    """Copy a run, with another description."""
    copy = folder / f"copy{len(list(folder.iterdir()))}"
    copy.mkdir()
    for file in run.glob("rank-*"):
        (copy / file.name).write_bytes(file.read_bytes())
    meta = json.loads((run / "run.json").read_text())
    change(meta)
    (copy / "run.json").write_text(json.dumps(meta))
    return copy


def only_params(name: str) -> Any:
    def change(meta: Any) -> None:
        rules = [rule for rule in meta["plan"]["rules"] if rule["params"]]
        meta["plan"]["rules"] = [{**rule, "params": [name]} for rule in rules]

    return change


def only_rule(place: int) -> Any:
    def change(meta: Any) -> None:
        meta["plan"]["rules"] = [meta["plan"]["rules"][place]]

    return change


class TestRefused:
    def test_no_fingerprints(self, reference: Any, tmp_path: Any) -> None:
        rules = {"version": 1, "rules": [{"id": "n", "action": "norm-log", "params": "*"}]}
        model = nn.Linear(2, 1)
        with gradsurgeon.apply(model, rules, record=tmp_path / "plain"):
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RecordError, match=r"has no fingerprints .*; record it with"):
            gradsurgeon.compare(tmp_path / "plain", reference)

    def test_other_kinds_of_tensors(self, reference: Any, tmp_path: Any) -> None:
        ones = [copied(reference, tmp_path, only_rule(place)) for place in (0, 3)]
        with pytest.raises(RecordError, match="have no kind of tensor in common: record both by"):
            gradsurgeon.compare(*ones)

    def test_other_steps(self, made: Any, reference: Any) -> None:
        later = made("later", start=10)
        said = "have no step in common: record the same steps"
        with pytest.raises(RecordError, match=said):
            gradsurgeon.compare(later, reference)
        part = gradsurgeon.compare(made("overlap", start=1), reference)
        assert "2 of 4 steps are not in all runs" in part.notes

    def test_other_names(self, made: Any, reference: Any) -> None:
        with pytest.raises(
            RecordError,
            match=r"have no tensor in common: .*by lines `old: new` in --map FILE",
        ):
            gradsurgeon.compare(made("images", kind=Convolutions), reference)


class TestForms:
    def test_json(self, made: Any, reference: Any, noise: Any) -> None:
        found = gradsurgeon.compare(made("detached", fault("detach in the MLP")), reference, noise)
        form = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert " ".join(form) == (
            "version alike verdict run reference step phase inside last first modules steps growth largest only_run "
            "only_reference undecided tolerance notes model others"
        )
        assert " ".join(form["first"][0]) == (
            "name tensor step phase micro_batch call rank distance tolerance why text"
        )
        assert (form["version"], form["alike"], form["step"]) == (1, False, 0)
        assert form["first"][0]["distance"] is None
        assert " ".join(form["steps"][0]) == "step compared apart median largest"
        assert " ".join(form["tolerance"]) == "kind times least text"
