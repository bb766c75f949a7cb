"""A failed step as a directory: whole or not there, read without running anything, and diagnosed alike elsewhere."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import call
from models import same
from pairs import singly
from small import attach, equal, sgd
from torch import nn

import gradsurgeon
from gradsurgeon import Diagnosis, GradSurgeonError, NonFiniteGradientError

Made = tuple[NonFiniteGradientError, Path]
TRAP = {"id": "trap", "action": "nan-trap", "params": "*"}
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(width, 2)

    def forward(self, x, *, scale=1.0, more=()):
        hidden = self.drop(self.norm(self.first(x)))
        return {"out": self.last((hidden * scale).log() if hidden.min() < -1 else hidden)}

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x, *, scale=1.0, more=()):
        return {"out": self.last(x / (x[:, :1] > 0))}

def build():
    torch.manual_seed(7)
    return Net()

def wider():
    return Net(5)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    (folder / "net.py").write_text(textwrap.dedent(MODEL))
    return folder


@pytest.fixture
def net(home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(home))
    import net  # type: ignore[import-not-found] # of this test

    return net


def fail(model: nn.Module, *, more: Any = (), **options: Any) -> NonFiniteGradientError:
    """Return the error of a step that fails; what is random in it must be kept."""
    rule = {**TRAP, **options.pop("rule", {})}
    optimizer = sgd(model)
    torch.manual_seed(1)
    given = torch.randn(8, 4)
    with attach(model, rule, optimizer=optimizer, **options):
        for _ in range(20):
            optimizer.zero_grad()
            model(given, scale=2.0, more=more)["out"].square().mean().backward()
            try:
                optimizer.step()
            except NonFiniteGradientError as error:
                return error
    raise AssertionError("no step has failed")


@pytest.fixture
def made(net: Any, tmp_path: Path) -> Made:
    error = fail(
        net.build(), record=tmp_path / "run", more=[(1, "text", None, {"x": torch.ones(2)})]
    )
    assert error.bundle is not None
    return error, Path(error.bundle)


def test_it_lies_in_the_run_and_is_diagnosed_alike(net: Any, made: Made, tmp_path: Path) -> None:
    error, place = made
    assert place == tmp_path / "run" / f"trap-step{error.step}-rank0"
    assert sorted(file.name for file in place.iterdir()) == ["step.json", "step.pt"]
    assert f"gradsurgeon replay {place} --model MODULE:BUILD" in str(error)
    model = net.build()
    model.eval()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    again = gradsurgeon.replay(place, model)
    assert isinstance(error.diagnosis, Diagnosis)
    first = error.diagnosis
    assert (first.certainty, first.operation, first.module) == ("reproduced", "aten.log", ".")
    for name in ("certainty", "reasons", "what", "where", "operation", "module", "lines", "step"):
        assert getattr(again, name) == getattr(first, name), name
    assert again.inputs == first.inputs
    assert again.cause == first.cause
    after = model.state_dict().values()
    assert same(before, after)
    assert not model.training


def test_without_a_run_it_is_written_where_the_rule_asks_for_it(
    net: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fail(net.build()).bundle is None
    assert not list(tmp_path.iterdir())
    first, second = (fail(net.build(), rule={"bundle": True}) for _ in range(2))
    name = f"trap-step{first.step}-rank0"
    assert [first.bundle, second.bundle] == [
        f"gradsurgeon-traps/{name}",
        f"gradsurgeon-traps/{name}-2",
    ]


@pytest.mark.slow
def test_the_command_says_the_same(home: Path, made: Made) -> None:
    error, place = made
    done = call("replay", str(place), "--model", "net:build", "--device", "cpu", cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    told = str(error)[str(error).index("diagnosis (") : str(error).index("  to run the step again")]
    assert done.stdout.strip() == told.strip()


CANDIDATES = {
    "bounded": (
        [
            {"id": "calm", "action": "clamp", "modules": "last", "tensor": "input", "max": 9},
            {"id": "least", "action": "clamp", "modules": "last", "tensor": "input", "min": -9},
            {"id": "clean", "action": "sanitize", "modules": "last", "tensor": "output.grad"},
            {"id": "bound", "action": "clip-norm", "params": "*", "max_norm": 0.1, "per": "rule"},
        ],
        "  rule bound: fired 2, changed 2\n  the gradients are finite: norm 0.1, the largest 0.0",
    ),
    "trapped": (
        [TRAP, {"id": "late", "action": "freeze", "params": "*", "steps": {"from": 1000}}],
        "  step 0, rule trap: 2 of 2 gradients are not finite after backward\n"
        "  rule trap: checked 1 update, tripped 1 time\n  rule late: fired 0, changed 0\n"
        "  2 of 2 gradients are not finite: last.weight, last.bias\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CANDIDATES)
def test_candidate_rules_act_in_the_step(home: Path, net: Any, tmp_path: Path, name: str) -> None:
    place = fail(net.Rows(), record=tmp_path / "run").bundle
    rules, end = CANDIDATES[name]
    file = tmp_path / "candidate.yaml"
    file.write_text(json.dumps({"version": 1, "rules": rules}))
    done = call("replay", str(place), "--model", "net:Rows", "--rules", str(file), cwd=home)
    assert done.returncode == 0, done.stderr
    head, told = done.stdout.split("\nunder ")
    assert head.startswith("diagnosis (reproduced)")
    assert told.startswith(f"{file}, with the output gradients of the step:\n")
    assert end in told


@pytest.mark.slow
def test_the_debugger_stands_where_it_was_born(home: Path, made: Made) -> None:
    _, place = made
    command = [sys.executable, "-m", "gradsurgeon", "replay", str(place), "--model", "net:build"]
    done = subprocess.run(
        [*command, "--pdb"],
        cwd=home,
        input="p operation, float(inputs['self'].min()) < 0, bool(output.isnan().any())\n"
        "p sorted(locals())\nu\nd\nn\nc\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "('aten.log', True, True)" in done.stdout
    stops = [line for line in done.stdout.splitlines() if line.startswith(("> ", "(Pdb) > "))]
    assert f"{home / 'net.py'}(" in stops[0], stops
    assert "'x'" in done.stdout
    assert done.stdout.count("diagnosis (") == 1


@pytest.mark.parametrize("damage", ["gone", "pipe", "folder of a run", "cut", "noise", "empty"])
def test_what_is_damaged_or_no_bundle_is_refused(
    net: Any, made: Made, tmp_path: Path, damage: str
) -> None:
    place = shutil.copytree(made[1], tmp_path / "copy")
    file, text = place / "step.pt", r"is no bundle: it has no file step\.pt"
    whole = file.read_bytes()
    file.unlink()
    if damage == "pipe":
        os.mkfifo(file)
    elif damage == "folder of a run":
        place = made[1].parent
    elif damage != "gone":
        faulty = {"cut": whole[: len(whole) // 2], "noise": b"\x00\xff" * 50, "empty": b""}
        file.write_bytes(faulty[damage])
        text = "is no bundle"
    with pytest.raises(GradSurgeonError, match=text):
        gradsurgeon.replay(place, net.build())


def rewrite(place: Path, **values: Any) -> None:
    """Change entries of a bundle."""
    document = torch.load(place / "step.pt", weights_only=True)
    torch.save({**document, **values}, place / "step.pt")


@pytest.mark.parametrize("number", [1, 4, "\x1b[31m"])
def test_a_bundle_of_another_format_is_refused(
    net: Any, made: Made, tmp_path: Path, number: object
) -> None:
    place = shutil.copytree(made[1], tmp_path / "copy")
    rewrite(place, format=number)
    with pytest.raises(GradSurgeonError, match="it has another format than 6"):
        gradsurgeon.replay(place, net.build())


def test_memory_stays_in_the_order_of_the_file(net: Any, made: Made, tmp_path: Path) -> None:
    place = shutil.copytree(made[1], tmp_path / "copy")
    document = torch.load(place / "step.pt", weights_only=True)
    call = document["calls"][0]
    big = torch.zeros(2**20)
    call["kwargs"] = {**call["kwargs"], "more": [big.view(-1) for _ in range(128)]}
    rewrite(place, calls=[call])
    with pytest.raises(GradSurgeonError, match="more elements than its size allows"):
        gradsurgeon.replay(place, net.build())
    call["kwargs"]["more"] = [big] * 128  # The same one is copied once.
    rewrite(place, calls=[call])
    assert gradsurgeon.replay(place, net.build()).certainty == "reproduced"
    rewrite(place, calls=[call] * 257)
    with pytest.raises(GradSurgeonError, match="a step has at most 256 calls"):
        gradsurgeon.replay(place, net.build())


@singly(
    key=[
        "calls",
        "torch",
        "step",
        "weights",
        "passes",
        "scale",
        "losses",
        "modules",
        "bad",
        "device",
        "trees",
    ],
    value=[{"a": 1}, [[]], "x", -1, None],
)
def test_hostile_entries_end_in_an_error_or_a_diagnosis(
    net: Any, made: Made, tmp_path: Path, key: str, value: Any
) -> None:
    place = shutil.copytree(made[1], tmp_path / "copy")
    rewrite(place, **{key: value})
    # Whatever it says: it is one of ours.
    with suppress(GradSurgeonError):
        assert str(gradsurgeon.replay(place, net.build()))


class Kind(dict[str, int]):
    """A dict of the script's."""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (object(), "(opcode NEWOBJ)"),
        (Kind(), "(opcode NEWOBJ)"),
        ({(1, object()): 2}, "(opcode NEWOBJ)"),
        (torch.eye(3).to_sparse(), "(torch._utils._rebuild_sparse_tensor)"),
    ],
)
def test_what_a_bundle_cannot_hold_is_said_when_it_is_not_written(
    net: Any, tmp_path: Path, more: Any, said: str
) -> None:
    error = fail(net.build(), record=tmp_path / "run", more=more)
    assert error.bundle is None
    (line,) = (line for line in str(error).splitlines() if "no bundle was written" in line)
    given = "the model was given more than tensors, plain values, lists, tuples and dicts"
    assert line == f"  no bundle was written: {given}: it holds objects that would run code {said}"
    assert [file.name for file in (tmp_path / "run").iterdir() if "trap" in file.name] == []
    assert isinstance(error.diagnosis, Diagnosis)
    assert error.diagnosis.certainty == "reproduced"


def test_a_disk_that_refuses_is_no_crash(
    net: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gradsurgeon-traps").write_text("a file is in the way")
    error = fail(net.build(), rule={"bundle": True})
    assert error.bundle is None
    assert "no bundle was written: " in str(error)
    assert isinstance(error.diagnosis, Diagnosis)
    assert error.diagnosis.certainty == "reproduced"


def test_weights_that_are_too_large_are_left_out(
    net: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradsurgeon.forensics import bundle

    monkeypatch.setattr(bundle, "MAX_BYTES", 10)
    error = fail(net.build(), record=tmp_path / "run")
    assert error.bundle is not None
    torch.manual_seed(0)
    again = gradsurgeon.replay(error.bundle, net.build())
    assert again.certainty != "reproduced"
    assert "the bundle has no weights" in " ".join(again.reasons)


def test_a_session_of_the_model_rests(net: Any, made: Made) -> None:
    model = net.build()
    rule = {"id": "zero", "action": "zero", "modules": "first", "tensor": "output"}
    with attach(model, rule) as session:
        assert gradsurgeon.replay(made[1], model).certainty == "reproduced"
        assert session.status()["zero"].fired == 0


def test_what_was_frozen_then_is_frozen_in_the_replay(net: Any, tmp_path: Path) -> None:
    model = net.build()
    model.first.requires_grad_(False)
    error = fail(model, record=tmp_path / "run")
    assert error.bundle is not None
    again = gradsurgeon.replay(error.bundle, net.build())
    assert isinstance(error.diagnosis, Diagnosis)
    assert (again.certainty, again.lines) == (error.diagnosis.certainty, error.diagnosis.lines)


def test_layouts_and_views_of_inputs_are_kept(net: Any, tmp_path: Path) -> None:
    whole = torch.randn(6)
    views = [whole, whole[2:4], whole.view(2, 3).t(), torch.ones(1, 3).expand(5, 3)]
    more = [*views, {1: torch.Size([2])}, torch.float16]
    error = fail(net.build(), record=tmp_path / "run", more=more)
    assert error.bundle is not None
    from gradsurgeon import forensics

    failed, _ = forensics.read(error.bundle, net.build())
    kept = failed.kept.calls[0].kwargs["more"]
    assert equal(kept[:4], views)
    assert kept[2].stride() == views[2].stride()
    assert kept[4:] == more[4:]
    assert gradsurgeon.replay(error.bundle, net.build()).certainty == "reproduced"


@pytest.mark.slow
def test_a_device_that_is_not_there(home: Path, made: Made) -> None:
    command = ["replay", str(made[1]), "--model", "net:build", "--device", "nowhere\x1b"]
    done = call(*command, cwd=home)
    assert done.returncode == 2
    assert done.stderr.startswith("gradsurgeon: --device nowhere\\x1b: ")
    assert len(done.stderr.splitlines()) == 1


_OTHER = "this may not be the model of the bundle: its modules differ"


@pytest.mark.parametrize("other", ["class", "layer", "child", "width", "model"])
def test_a_model_of_other_modules_is_doubted(net: Any, made: Made, other: str) -> None:
    model = net.wider() if other == "width" else net.build()
    if other == "class":
        model.__class__ = type("Web", (type(model),), {})
    elif other == "layer":
        model.drop = nn.Dropout1d(0.5)
    elif other == "child":
        model.drop.extra = nn.Identity()
    elif other == "model":
        model = nn.Linear(2, 2)
    again = gradsurgeon.replay(made[1], model)
    assert again.certainty != "reproduced"
    assert again.reasons[0] == _OTHER


def test_a_bundle_that_tells_no_modules_is_doubted(net: Any, made: Made, tmp_path: Path) -> None:
    place = shutil.copytree(made[1], tmp_path / "copy")
    for tree in (None, {"": "Net"}):
        rewrite(place, trees={".": tree})
        again = gradsurgeon.replay(place, net.build())
        assert (again.certainty, again.operation) == ("partial", "aten.log")
        assert again.reasons == (_OTHER,)


def test_random_numbers_of_python_and_numpy_are_in_it(net: Any, tmp_path: Path) -> None:
    model = net.build()
    drawn: list[float] = []

    def draw(_module: nn.Module, given: Any) -> Any:
        # An odd number of normal ones: the next is waiting.
        normal = random.gauss() + np.random.normal()  # noqa: NPY002 # what scripts draw from
        drawn.append(random.random() + np.random.random() + normal)  # noqa: NPY002 # the same
        return (given[0] * drawn[-1],)

    hook = model.first.register_forward_pre_hook(draw)
    error = fail(model, record=tmp_path / "run")
    hook.remove()
    assert error.bundle is not None
    model = net.build()
    model.first.register_forward_pre_hook(draw)
    random.seed(5)
    again = gradsurgeon.replay(error.bundle, model)
    assert drawn[-1] == drawn[-2]
    assert again.certainty == "reproduced"
    assert random.random() == random.Random(5).random()
