"""Rows and events on their way to the disk: what a session wires together, without one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from models import Tied
from runs import KEY, meta
from small import kinds_of
from torch import Tensor

import gradsurgeon
from gradsurgeon import GradSurgeonWarning, load
from gradsurgeon.language.planning.run_json import describe
from gradsurgeon.records.event_log import EventLog
from gradsurgeon.records.recorder import Recorder
from gradsurgeon.records.store import Records
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report import from_run

pytestmark = pytest.mark.cover_children


class Parts:
    """Journal, recorder and writer of one session."""

    def __init__(self, path: Path) -> None:
        rules = load('version: 1\nrules:\n  - {id: norms, action: norm-log, params: "*"}\n').rules
        self.writer = RunWriter(path, meta=meta())
        self.journal = EventLog(rules, [2])
        self.records = Records()
        self.recorder = Recorder(self.records, self.journal, self.writer)

    def row(self, step: int, values: Tensor, *, replace: bool = True) -> None:
        self.recorder.add(KEY, step, [0, 1], values, replace=replace)
        self.journal.count_fired("norms", step, 2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def written(path: Path) -> list[tuple[int, float]]:
    with open_run(path) as run:
        return [pair for series in run for pair in series.values_of("a.bias")]


def test_rows_reach_the_disk_after_a_second(tmp_path: Path, clock: list[float]) -> None:
    parts = Parts(tmp_path)
    parts.row(0, torch.tensor([1.0, 2.0]))
    clock[0] += 0.9
    parts.row(1, torch.tensor([1.0, 3.0]))
    assert written(tmp_path) == []
    clock[0] += 0.1
    parts.row(2, torch.tensor([1.0, 4.0]))
    assert written(tmp_path) == [(0, 2.0), (1, 3.0), (2, 4.0)]
    with open_run(tmp_path) as run:
        assert run.status()["norms"].fired == 4
    parts.recorder.close()


def test_long_steps_are_written_when_they_end(tmp_path: Path, clock: list[float]) -> None:
    parts = Parts(tmp_path)
    for step in range(3):
        clock[0] += 5.0
        parts.row(step, torch.ones(2))
        parts.row(step, torch.full((2,), 2.0))
        parts.recorder.end_step()
        assert written(tmp_path)[-1] == (step, 2.0)
    parts.recorder.close()


def test_a_failure_is_one_event_and_memory_goes_on(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "run")
    parts.row(0, torch.ones(2))
    for entry in (tmp_path / "run").iterdir():
        entry.unlink()
    with pytest.warns(GradSurgeonWarning, match="records are no longer written") as told:
        for step in range(1, 4):
            parts.journal.emit("scaler-skip", "again", step=step)
            parts.row(step, torch.ones(2))
        parts.recorder.flush()
        parts.recorder.close()
    assert len(told) == 1
    kinds = kinds_of(parts.journal)
    assert sorted(kinds) == ["notice", "scaler-skip", "scaler-skip", "scaler-skip"]
    assert "training goes on, and records go on in memory" in str(parts.journal.events)
    assert len(parts.records) == 4


def test_the_description_of_a_plan_is_what_a_report_reads(tmp_path: Path) -> None:
    norms = {"id": "norms", "action": "norm-log", "params": "*"}
    double = {"id": "double", "action": "scale", "params": "*.weight", "factor": 2.0}
    plan = gradsurgeon.plan(Tied(), {"version": 1, "rules": [norms, double]})
    about = describe(plan, mode="act", start_step=7, torch=torch.__version__)
    assert (about["torch"], about["mode"], about["start_step"]) == (torch.__version__, "act", 7)
    RunWriter(tmp_path, meta=about).close()
    with open_run(tmp_path) as run:
        with pytest.raises(gradsurgeon.RecordError, match=r"l2 of emb.weight has not been"):
            run.latest("head.weight")
        report = from_run(run)
    assert report.title == f"{plan.rules.file} on Tied"
    assert report.rules["norms"].logged == ("emb.weight", "body.weight", "body.bias")
    assert (report.rules["double"].action, report.rules["double"].role) == ("scale", "edit")
