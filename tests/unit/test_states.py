"""What a session goes on from: damaged, as a file, of other ranks, and where it cannot be written."""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import data
from torch import nn
from torch.utils.data import DataLoader

import gradsurgeon
from gradsurgeon import GradSurgeonError, GradSurgeonWarning
from gradsurgeon.recording import recorder
from gradsurgeon.runtime import session_state

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"id": "spikes", "action": "spike-trap", "params": "*", "above": {"sigmas": 2.5}},
        {"id": "norms", "action": "norm-log", "params": "*"},
    ],
}
STEPS = 6


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def train(model: nn.Module, batches: Any = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in data(3, STEPS, 5, 4) if batches is None else batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def trained(**options: Any) -> gradsurgeon.Session:
    model = make()
    with gradsurgeon.apply(model, RULES, **options) as session:
        train(model)
    return session


def same(one: Any, other: Any) -> bool:
    """Compare two states, bit for bit."""
    files = []
    for state in (one, other):
        torch.save(state, file := io.BytesIO())
        files.append(file.getvalue())
    return files[0] == files[1]


def controller(session: gradsurgeon.Session) -> Any:
    return session._attachment.controller


@pytest.mark.parametrize("per", ["rule", "parameter"])
def test_a_parameter_of_another_shape_begins_anew_and_is_named(per: str) -> None:
    rules = {"version": 1, "rules": [{**RULES["rules"][0], "per": per}]}
    model = make()
    with gradsurgeon.apply(model, rules) as session:
        train(model)
        state = session.state_dict()
    wide = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 7))
    with gradsurgeon.apply(wide, rules) as session:
        with pytest.warns(
            GradSurgeonWarning,
            match=r"1.bias, 1.weight: not in the rule and in the state alike, or of another shape",
        ):
            session.load_state_dict(state)
        learnt = session.state_dict()["rules"]["spikes"]["statistics"]
        known = sorted(name for part in learnt for name in part["params"])
        assert known == ([] if per == "rule" else ["0.bias", "0.weight"])
        assert session.step == STEPS


def test_a_state_without_shapes_goes_on_as_before() -> None:
    state = trained().state_dict()
    del state["shapes"]
    with gradsurgeon.apply(make(), RULES) as session:
        session.load_state_dict(state)
        assert session.step == STEPS


# --- damage ---------------------------------------------------------------------------------------


def _set(state: Any, value: Any, *place: Any) -> None:
    for key in place[:-1]:
        state = state[key]
    state[place[-1]] = value


DAMAGE: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "a step below 0": (("step",), -3, "state['step']: -3 should be greater than or equal to 0"),
    "a step that is none": (
        ("steps", "0.weight"),
        "x",
        "state['steps']['0.weight']: 'x' should be a valid integer",
    ),
    "a step with a fraction": (
        ("common_step",),
        1.0,
        "state['common_step']: 1.0 should be a valid integer",
    ),
    "a row below 0": (
        ("in_a_row",),
        {"t": {"0.weight": -1}},
        "['in_a_row']['t']['0.weight']: -1 should",
    ),
    "no statistics": (("rules", "spikes"), {"bound": "sigmas"}, "['spikes']['per']: is missing"),
    "a word": (("rules", "spikes", "per"), "row", "['per']: 'row' should be 'rule' or 'parameter'"),
    "a number": (("rules", "spikes", "statistics", 0, "kept"), 1.0, "['kept']: 1.0 should be an"),
    "no fractions": (
        ("rules", "spikes", "statistics", 0, "kept"),
        torch.ones(3, 1, dtype=torch.long),
        "['spikes']: statistic 0 has numbers that a rule never learns",
    ),
    "sparse": (
        ("rules", "spikes", "statistics", 0, "kept"),
        torch.ones(3, 1).to_sparse(),
        "statistic 0 has numbers that a rule never learns",
    ),
    "NaN": (
        ("rules", "spikes", "statistics", 0, "kept", (1, 0)),
        math.nan,
        "statistic 0 has numbers that a rule never learns",
    ),
    "a norm below 0": (
        ("rules", "spikes", "statistics", 0, "usual", 1),
        -1.0,
        "statistic 0 has numbers that a rule never learns",
    ),
    "another size": (
        ("rules", "spikes", "statistics", 0, "kept"),
        torch.ones(2, 1),
        "statistic 0 of 4 parameters has numbers of sizes (2, 1) and (4,), should be (3, 1) and (4,)",
    ),
    "a step beyond all": (("step",), 10**30, "should be less than or equal to 9007199254740992"),
    "a name twice": (
        ("rules", "spikes", "statistics", 0, "params", 1),
        "0.weight",
        "statistic 0 of 4 parameters has numbers of sizes",
    ),
    "a name less": (
        ("rules", "spikes", "statistics", 0, "params"),
        ["0.weight"],
        "statistic 0 of 1 parameters has numbers of sizes (3, 1) and (4,)",
    ),
}


@pytest.fixture
def state() -> Any:
    return trained().state_dict()


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_damaged_is_named_and_changes_nothing(name: str, state: Any) -> None:
    place, value, told = DAMAGE[name]
    _set(state, value, *place)
    with gradsurgeon.apply(make(), RULES) as session:
        before = session.state_dict()
        with pytest.raises(GradSurgeonError) as raised:
            session.load_state_dict(state)
        assert " in the state of a session; nothing was changed\n" in str(raised.value)
        assert told in str(raised.value)
        assert "resume from another one" in str(raised.value)
        assert same(session.state_dict(), before)


def test_all_damage_is_told_at_once(state: Any) -> None:
    names = ("a step below 0", "a row below 0", "NaN")
    for place, value, _ in map(DAMAGE.__getitem__, names):
        _set(state, value, *place)
    with gradsurgeon.apply(make(), RULES) as session:
        with pytest.raises(GradSurgeonError, match=r"^3 problems") as raised:
            session.load_state_dict(state)
        assert all(DAMAGE[name][2] in str(raised.value) for name in names)
        state["steps"] = dict.fromkeys(map(str, range(10_000)), -1)
        with pytest.raises(GradSurgeonError, match=r"\.\.\. and 9,983 more"):
            session.load_state_dict(state)


# --- files ----------------------------------------------------------------------------------------


def test_a_file_that_was_written_is_gone_on_from(tmp_path: Path) -> None:
    session = trained()
    session_state.write(tmp_path, controller(session))
    with gradsurgeon.apply(make(), RULES) as other:
        found = session_state.read(tmp_path)
        assert found is not None
        assert found.load(controller(other)) == STEPS
        assert same(other.state_dict(), session.state_dict())
        assert found.load(controller(other), step=3) == STEPS
        assert (other.step, other.events) == (3, [])


def test_a_rank_without_a_file_goes_on_from_that_of_the_first_one_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session_state.read(tmp_path) is None
    session = trained()
    session_state.write(tmp_path, controller(session))
    monkeypatch.setenv("RANK", "2")
    with gradsurgeon.apply(make(), RULES) as other:
        found = session_state.read(tmp_path)
        assert found is not None
        found.load(controller(other))
        assert same(other.state_dict(), session.state_dict())
        (event,) = other.events
    told = f"rank 2 has no state in {tmp_path}, and resumes from the state of rank 0"
    assert (event.kind, event.message, event.step) == ("notice", told, STEPS)
    session_state.write(tmp_path, controller(session))
    assert {path.name for path in tmp_path.iterdir()} == {"state-0.pt", "state-2.pt"}
    found = session_state.read(tmp_path)
    assert found is not None
    assert (found.path.name, found.notice) == ("state-2.pt", "")


class Foreign:
    """What only a file that runs code could bring back."""


@pytest.mark.parametrize("damage", ["empty", "junk", "cut", "code", "folder", "no state"])
def test_a_file_that_is_damaged_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "state-0.pt"
    session_state.write(tmp_path, controller(trained()))
    whole = path.read_bytes()
    if damage in ("code", "no state"):
        torch.save(Foreign() if damage == "code" else {"model": 1}, path)
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "junk": b"junk", "cut": whole[:-50]}[damage])
    with gradsurgeon.apply(make(), RULES) as session:
        with pytest.raises(GradSurgeonError) as raised:
            found = session_state.read(tmp_path)
            assert found is not None
            found.load(controller(session))
        assert session.step == 0
    assert str(raised.value).startswith(f"{path}: ")
    told = {
        "folder": "cannot be read: Is a directory",
        "no state": "this is not the state of a session",
        "code": "it holds objects that would run code (opcode NEWOBJ); resume",
    }
    assert told.get(damage, "is damaged, no whole file of `torch.save`; resume") in str(
        raised.value
    )
    assert "weights_only" not in str(raised.value)


# --- while training goes on -----------------------------------------------------------------------


def test_a_state_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_STATE_SECONDS", 0.0)
    model = make()
    with (
        gradsurgeon.apply(model, RULES, record=tmp_path / "run") as session,
        pytest.warns(GradSurgeonWarning) as told,
    ):
        (tmp_path / "run" / "state-0.pt").mkdir()
        train(model)
        # It is tried again, and once more at the end.
        shutil.rmtree(tmp_path / "run" / "state-0.pt")
    (text,) = [str(one.message) for one in told]
    assert text.startswith(
        "the state to resume from could not be written, and training goes on: Is"
    )
    assert session._attachment.context.recorder.lost == [text]
    assert session.step == STEPS
    found = session_state.read(tmp_path / "run")
    assert found is not None
    assert same(found.content, session.state_dict())


class Training(torch.utils.data.Dataset[Any]):
    """Batches whose making trains a model, which in a forked worker is a copy of one that has rules on it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        batches = data(3, STEPS, 5, 4)
        train(self._model, batches)
        return batches[index]


@pytest.mark.slow
def test_forked_workers_of_a_data_loader_leave_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_STATE_SECONDS", 0.0)
    model = make()
    loader: Any = DataLoader(
        Training(model), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    with gradsurgeon.apply(model, RULES, record=tmp_path / "run") as session:
        train(model, loader)
    assert same(session.state_dict(), trained().state_dict())
    found = session_state.read(tmp_path / "run")
    assert found is not None
    assert same(found.content, session.state_dict())
    with gradsurgeon.open_run(tmp_path / "run") as run:
        assert run.states == {0: "finished"}
        assert [step for step, _ in run.history("0.weight")] == list(range(STEPS))
