"""A session that writes a run directory, and what a reader finds in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, data
from ranks import Json
from runs import values
from small import equal, kinds_of, linears, rule_file, sgd
from torch import nn

import gradsurgeon
from gradsurgeon import RecordError
from gradsurgeon.records.delivery import Curves
from gradsurgeon.records.store import Key, Records
from gradsurgeon.records.store.memory import RecordedRow

RULES: Json = rule_file(
    {"id": "norms", "action": "norm-log", "params": "*", "stats": ["l2", "linf"]},
    {"id": "acts", "action": "norm-log", "modules": "0", "tensor": "output"},
    {"id": "bound", "action": "clamp", "params": "*.weight", "at": "step", "max": 1e-3},
    {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"},
)


def train(path: Path | None, steps: int = 5) -> gradsurgeon.Session:
    torch.manual_seed(0)
    model = linears(4, 3, 2)
    optimizer = sgd(model)
    with gradsurgeon.apply(model, RULES, record=path) as session:
        for number in range(steps):
            optimizer.zero_grad()
            bad = float("nan") if number == 3 else 1.0
            (model(data(number, 5, 4)).square().mean() * bad).backward()
            optimizer.step()
    return session


def test_a_run_says_what_its_session_said(tmp_path: Path) -> None:
    session = train(tmp_path / "run")
    with gradsurgeon.open_run(tmp_path / "run") as run:
        for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
            for stat in ("l2", "linf"):
                assert str(run.history(name, stat)) == str(session.history(name, stat))
        assert run.history("0") == session.history("0")
        assert len(run.history("0")) == 5
        assert run.events == session.events
        assert kinds_of(run) == ["trap", "skipped-step", "notice"]
        assert run.status() == session.status()
        assert run.meta["rules"]["sha256"] == session.plan.rules.sha256
        assert run.meta["plan"] == session.plan.to_dict()
        with pytest.raises(KeyError, match=r"no parameter '0.wieght' .* nearest: 0.weight"):
            run.latest("0.wieght")


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    case = CASES["mlp"]
    norms = {"id": "n", "action": "norm-log", "params": "*"}
    kept = {"id": "kept", "action": "capture", "params": "*"}
    maps = {"id": "maps", "action": "capture", "modules": "*", "tensor": "output"}
    rules = rule_file(norms, kept, maps)
    ends = []
    for path in (None, tmp_path / "run"):
        model = case.make()
        optimizer = case.optimizer(model)
        torch.manual_seed(1)
        with gradsurgeon.apply(model, rules, record=path):
            for number in range(5):
                case.backward(model, number)
                optimizer.step()
        ends.append([*model.state_dict().values(), torch.get_rng_state()])
    assert equal(*ends)


def test_a_place_that_cannot_be_written_is_refused_before_anything_happens(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    rules = rule_file({"id": "n", "action": "norm-log", "params": "*"})
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="file"):
        gradsurgeon.apply(model, rules, record=tmp_path / "file" / "run")
    assert not getattr(model.weight, "_post_accumulate_grad_hooks")  # noqa: B009 # typed as never None
    train(tmp_path / "run")
    with pytest.raises(RecordError, match="run"):
        gradsurgeon.apply(model, rules, record=tmp_path / "run")
    assert gradsurgeon.open_run(tmp_path / "run").latest("1.bias", "l2") > 0


def test_a_failing_apply_leaves_no_run_behind(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    rules: Any = rule_file({"id": "n", "action": "norm-log", "params": "nope"})
    with pytest.raises(gradsurgeon.BindError):
        gradsurgeon.apply(model, rules, record=tmp_path / "run")
    rules["rules"][0]["params"] = "*"
    gradsurgeon.apply(model, rules)
    with pytest.raises(gradsurgeon.GradSurgeonError, match="already applied"):
        gradsurgeon.apply(model, rules, record=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    gradsurgeon.remove(model)


def test_rows_that_make_room_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Records.__init__, "__defaults__", (31 * 168,))
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    rules = rule_file({"id": "n", "action": "norm-log", "params": "*"})
    with gradsurgeon.apply(model, rules) as session:
        for _ in range(200):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    (event,) = session.events
    assert "records in memory have reached their limit" in event.message
    assert len(session._attachment.records) == 31
    assert "371 rows dropped, the oldest" in str(gradsurgeon.report.summary(session))


def test_trackers_get_pairs_of_losses_one_by_one_and_of_many_the_least() -> None:
    def sent(stat: str, names: Sequence[str], *row: float) -> dict[str, float]:
        key = Key("tasks", stat, "backward", tuple(names))
        return Curves(()).scalars(RecordedRow(key, 3, values(*row)))

    assert sent("cosine", ("a/b", "a/c"), -0.5, float("nan")) == {"tasks/a/b/cosine": -0.5}
    assert sent("distance", ["combined"], 0.5) == {"tasks/combined/distance": 0.5}
    many = [f"w{place}:a/b" for place in range(100)]
    assert sent("cosine", many, *[0.0] * 99, -0.5) == {
        "tasks/cosine/not finite": 0.0,
        "tasks/cosine/median": 0.0,
        "tasks/cosine/largest": 0.0,
        "tasks/cosine/least": -0.5,
    }
