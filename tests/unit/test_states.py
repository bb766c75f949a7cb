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
from ranks import Json
from small import linears, rule_file, sgd, take_step
from torch import nn
from torch.utils.data import DataLoader

import gradsurgeon
from gradsurgeon import GradSurgeonError, GradSurgeonWarning, Session
from gradsurgeon.records import recorder
from gradsurgeon.runtime import session_state

RULES: Json = rule_file(
    {"id": "spikes", "action": "spike-trap", "params": "*", "above": {"sigmas": 2.5}},
    {"id": "norms", "action": "norm-log", "params": "*"},
)
STEPS = 6


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return linears(4, 3, 2)


def train(model: nn.Module, batches: Any = None) -> None:
    optimizer = sgd(model)
    for batch in data(3, STEPS, 5, 4) if batches is None else batches:
        take_step(optimizer, model(batch).square().mean())


def trained(**options: Any) -> Session:
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


def controller(session: Session) -> Any:
    return session._attachment.controller


@pytest.mark.parametrize("per", ["rule", "parameter"])
def test_a_parameter_of_another_shape_begins_anew_and_is_named(per: str) -> None:
    rules = rule_file({**RULES["rules"][0], "per": per})
    model = make()
    with gradsurgeon.apply(model, rules) as session:
        train(model)
        state = session.state_dict()
    wide = linears(4, 3, 7)
    with gradsurgeon.apply(wide, rules) as session:
        with pytest.warns(
            GradSurgeonWarning,
            match=r"other parameters or shapes than in the state \(1.bias, 1.weight\)",
        ):
            session.load_state_dict(state)
        learnt = session.state_dict()["rules"]["spikes"]["statistics"]
        known = sorted(name for part in learnt for name in part["params"])
        assert known == ([] if per == "rule" else ["0.bias", "0.weight"])
        assert session.step == STEPS


# --- damage ---------------------------------------------------------------------------------------


def _set(state: Any, value: Any, *place: Any) -> None:
    for key in place[:-1]:
        state = state[key]
    state[place[-1]] = value


DAMAGE: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "a step below 0": (
        ("step",),
        -3,
        "state['step']: Input should be greater than or equal to 0",
    ),
    "a step with a fraction": (
        ("common_step",),
        1.0,
        "state['common_step']: Input should be a valid integer",
    ),
    "no statistics": (
        ("rules", "spikes"),
        {"bound": "sigmas"},
        "['spikes']['per']: Field required",
    ),
    "a word": (
        ("rules", "spikes", "per"),
        "row",
        "['per']: Input should be 'rule', 'parameter' or 'loss'",
    ),
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
        assert told in str(raised.value)
        assert "resume from another one" in str(raised.value)
        assert same(session.state_dict(), before)


# --- files ----------------------------------------------------------------------------------------


def test_a_file_that_was_written_is_gone_on_from(tmp_path: Path) -> None:
    session = trained()
    session_state.write(tmp_path, controller(session))
    with gradsurgeon.apply(make(), RULES) as other:
        assert session_state.resume(tmp_path, controller(other)) == STEPS
        assert same(other.state_dict(), session.state_dict())
        assert session_state.resume(tmp_path, controller(other), step=3) == STEPS
        assert (other.step, other.events) == (3, [])


def test_a_rank_without_a_file_goes_on_from_that_of_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = trained()
    assert session_state.resume(tmp_path, controller(session)) is None
    session_state.write(tmp_path, controller(session))
    monkeypatch.setenv("RANK", "2")
    with gradsurgeon.apply(make(), RULES) as other:
        assert session_state.resume(tmp_path, controller(other)) == STEPS
        assert same(other.state_dict(), session.state_dict())
    session_state.write(tmp_path, controller(session))
    assert {path.name for path in tmp_path.iterdir()} == {"state-0.pt", "state-2.pt"}


class Foreign:
    """What only a file that runs code could bring back."""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("cut", "is damaged, no whole file of `torch.save`; resume"),
        ("code", "it holds objects that would run code (opcode NEWOBJ); resume"),
        ("folder", "Is a directory"),
        ("no state", "this is not the state of a session"),
    ],
)
def test_a_file_that_is_damaged_is_named(damage: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "state-0.pt"
    session_state.write(tmp_path, controller(trained()))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        torch.save(Foreign() if damage == "code" else {"model": 1}, path)
    with gradsurgeon.apply(make(), RULES) as session:
        with pytest.raises(GradSurgeonError) as raised:
            session_state.resume(tmp_path, controller(session))
        assert session.step == 0
    assert str(raised.value).startswith(f"{path}: ")
    assert said in str(raised.value)
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
    written = torch.load(tmp_path / "run" / "state-0.pt", weights_only=True)
    assert same(written, session.state_dict())


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
    written = torch.load(tmp_path / "run" / "state-0.pt", weights_only=True)
    assert same(written, session.state_dict())
    with gradsurgeon.open_run(tmp_path / "run") as run:
        assert run.states == {0: "finished"}
        assert [step for step, _ in run.history("0.weight")] == list(range(STEPS))
