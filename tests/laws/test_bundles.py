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
from models import same
from pairs import singly
from small import attach, sgd
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


def on_paper(values: Any) -> Any:
    return json.loads(json.dumps(values))


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
    command = [sys.executable, "-m", "gradsurgeon", "replay", str(place), "--model", "net:build"]
    done = subprocess.run(
        [*command, "--device", "cpu"], cwd=home, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = str(error)[str(error).index("diagnosis (") : str(error).index("  to run the step again")]
    assert done.stdout.strip() == told.strip()


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


@pytest.mark.parametrize("build", ["wider", None])
def test_another_model_is_told(net: Any, made: Made, build: str | None) -> None:
    model = nn.Linear(2, 2) if build is None else getattr(net, build)()
    again = gradsurgeon.replay(made[1], model)
    assert again.certainty != "reproduced"
    assert _OTHER in again.reasons


@pytest.mark.parametrize("damage", ["gone", "cut", "noise", "empty"])
def test_what_is_damaged_is_refused(net: Any, made: Made, tmp_path: Path, damage: str) -> None:
    place = shutil.copytree(made[1], tmp_path / "copy")
    whole = (place / "step.pt").read_bytes()
    if damage == "gone":
        (place / "step.pt").unlink()
    else:
        faulty = {"cut": whole[: len(whole) // 2], "noise": b"\x00\xff" * 50, "empty": b""}
        (place / "step.pt").write_bytes(faulty[damage])
    with pytest.raises(GradSurgeonError, match="is no bundle"):
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
    with pytest.raises(GradSurgeonError, match="it has another format than 5"):
        gradsurgeon.replay(place, net.build())


def test_the_json_is_for_people(net: Any, made: Made) -> None:
    error, place = made
    told = json.loads((place / "step.json").read_text())
    assert (told["step"], told["rank"], sorted(told["bad"])) == (
        error.step,
        0,
        sorted(name for name, _ in net.build().named_parameters()),
    )
    assert told["text"][0] == str(error.diagnosis).splitlines()[0]
    # The path of the bundle is known later.
    assert {**told["diagnosis"], "bundle": str(place)} == on_paper(error.diagnosis.to_json())


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


def test_tensors_that_share_memory_are_written(net: Any, tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    shared = [whole, whole[2:4], whole.view(2, 3).t(), {1: torch.Size([2])}, torch.float16]
    error = fail(net.build(), record=tmp_path / "run", more=shared)
    assert error.bundle is not None
    again = gradsurgeon.replay(error.bundle, net.build())
    assert again.certainty == "reproduced"


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


def test_layouts_of_inputs_are_kept(net: Any, tmp_path: Path) -> None:
    lying = torch.randn(4, 6).t()
    error = fail(net.build(), record=tmp_path / "run", more=[lying, torch.ones(1, 3).expand(5, 3)])
    assert error.bundle is not None
    from gradsurgeon import forensics

    failed, _ = forensics.read(error.bundle, net.build())
    kept = failed.kept.calls[0].kwargs["more"]
    assert kept[0].stride() == lying.stride()
    assert torch.equal(kept[0], lying)
    assert torch.equal(kept[1], torch.ones(5, 3))


@pytest.mark.parametrize("what", ["pipe", "folder of a run"])
def test_what_is_no_bundle(net: Any, made: Made, tmp_path: Path, what: str) -> None:
    place = shutil.copytree(made[1], tmp_path / "copy")
    if what == "folder of a run":
        place = made[1].parent
    else:
        (place / "step.pt").unlink()
        os.mkfifo(place / "step.pt")
    with pytest.raises(GradSurgeonError, match=r"is no bundle: it has no file step\.pt"):
        gradsurgeon.replay(place, net.build())


@pytest.mark.slow
def test_a_device_that_is_not_there(home: Path, made: Made) -> None:
    command = [sys.executable, "-m", "gradsurgeon", "replay", str(made[1]), "--model", "net:build"]
    done = subprocess.run(
        [*command, "--device", "nowhere\x1b"], cwd=home, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gradsurgeon: --device nowhere\\x1b: ")
    assert len(done.stderr.splitlines()) == 1


_OTHER = "this may not be the model of the bundle: its modules differ"


@pytest.mark.parametrize("other", ["class", "layer", "child"])
def test_a_model_of_the_same_shapes_and_other_modules_is_doubted(
    net: Any, made: Made, other: str
) -> None:
    model = net.build()
    if other == "class":
        model.__class__ = type("Web", (type(model),), {})
    elif other == "layer":
        model.drop = nn.Dropout1d(0.5)
    else:
        model.drop.extra = nn.Identity()
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
