"""Numbers on their way from a device: who gets them when, and that nothing is mixed up."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from runs import KEY, meta
from small import fields_of, sgd
from torch import Tensor

import gradsurgeon
from gradsurgeon import Event, load
from gradsurgeon.records.device_queue import DeviceQueue
from gradsurgeon.records.event_log import EventLog
from gradsurgeon.records.recorder import Recorder
from gradsurgeon.records.store import Key, Records
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.tensors import _torch


class Copy(_torch.Arrival):
    """Copies that have their numbers when they are told to arrive, as late as that may be."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        # What comes later on the same stream does not change what is copied.
        self._then = torch.cat(list(parts))
        super().__init__(parts, torch.full_like(self._then, math.nan))
        self.there = False

    def done(self) -> bool:
        return self.there

    def arrive(self) -> None:
        self._host.copy_(self._then)
        self.there = True

    def wait(self) -> Sequence[Tensor]:
        self.arrive()
        return super().wait()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Copy]:
    """Let the CPU play a device from which copies arrive late."""
    sent: list[Copy] = []

    def send(parts: Sequence[Tensor]) -> Copy:
        sent.append(Copy(parts))
        return sent[-1]

    monkeypatch.setattr(_torch, "is_host", lambda _: False)
    monkeypatch.setattr(_torch, "send", send)
    return sent


def collecting() -> tuple[DeviceQueue[int], list[tuple[int, list[float]]]]:
    taken: list[tuple[int, list[float]]] = []
    return DeviceQueue(lambda rows: taken.extend((i, v.tolist()) for i, v in rows)), taken


def test_a_device_that_is_behind_is_not_waited_for(copies: list[Copy]) -> None:
    ring, taken = collecting()
    for number in range(300):
        ring.put(number, torch.tensor([float(number)]))
        ring.send()
    assert not any(copy.there for copy in copies)
    for copy in copies:
        copy.arrive()
    ring.put(300, torch.tensor([300.0]))
    ring.send()
    ring.send()
    assert taken == [(number, [float(number)]) for number in range(300)]
    assert len(copies) == 301


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.float64])
def test_numbers_of_all_kinds_travel_together(dtype: torch.dtype, copies: list[Copy]) -> None:
    ring, taken = collecting()
    ring.put(0, torch.ones((), dtype=dtype))
    later = torch.full((2, 2), 0.5)
    ring.put(1, later)
    later.zero_()  # it was copied when it was put
    ring.send(wait=True)
    assert taken == [(0, [1.0]), (1, [0.5] * 4)]
    assert len(copies) == 1


def play(recorder: Recorder, seed: int, meanwhile: Callable[[], None]) -> list[bytes]:
    """Record what a run could, and return every byte of it."""
    chance = random.Random(seed)
    keys = [
        (Key(f"r{number}", "l2", "accumulated", tuple("abcdef"[: 2 + number])), bool(number % 2))
        for number in range(4)
    ]
    generator = torch.Generator().manual_seed(seed)
    for step in range(120):
        for key, replace in keys:
            for _ in range(chance.randint(0, 2)):
                width = len(key.names)
                found = sorted(chance.sample(range(width), chance.randint(1, width)))
                values = torch.randn(len(found), generator=generator)
                recorder.add(key, step, found, values, replace=replace)
                meanwhile()
        if chance.random() < 0.05:
            recorder.flush()
    recorder.flush()
    return [
        repr((series.key, name, series.values_of(name))).encode()
        for series in recorder.records
        for name in series.key.names
    ]


@pytest.mark.parametrize("seed", range(3))
def test_records_are_the_same_however_late_they_arrive(
    seed: int, request: pytest.FixtureRequest
) -> None:
    at_once = play(Recorder(Records(), EventLog([], [])), seed, lambda: None)
    copies: list[Copy] = request.getfixturevalue("copies")
    chance = random.Random(-seed - 1)

    def meanwhile() -> None:
        late = [copy for copy in copies if not copy.there]
        if late and chance.random() < 0.02:
            late[0].arrive()

    assert play(Recorder(Records(), EventLog([], [])), seed, meanwhile) == at_once
    assert len(copies) > 4


def test_rows_are_written_once_they_have_arrived_and_events_after_them(
    tmp_path: Path, copies: list[Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    recorder = Recorder(Records(), EventLog([], []), RunWriter(tmp_path, meta=meta()))

    def written() -> list[tuple[int, float]]:
        with open_run(tmp_path) as run:
            return [pair for series in run for pair in series.values_of("a.bias")]

    recorder.add(KEY, 0, [0, 1], torch.tensor([0.0, 1.0]), replace=False)
    now[0] += 1.1
    recorder.add(KEY, 1, [0, 1], torch.tensor([0.0, 2.0]), replace=False)
    assert len(copies) == 1
    recorder.end_step()
    assert written() == []
    copies[0].arrive()
    now[0] += 1.1
    recorder.end_step()
    assert written() == [(0, 1.0), (1, 2.0)]
    recorder.add(KEY, 2, [0, 1], torch.tensor([0.0, 3.0]), replace=False)
    recorder.event(Event("notice", "norms", 2, 0, "", "waits for no device"))
    assert [copy.there for copy in copies] == [True, False]
    recorder.event(Event("trap", "norms", 2, 0, "a.bias", "bad"))
    assert written() == [(0, 1.0), (1, 2.0), (2, 3.0)]
    recorder.close()


def test_doubts_wait_together(copies: list[Copy]) -> None:
    journal = EventLog([], [])
    for step in range(300):
        journal.emit_if(torch.tensor(step in (7, 290)), "left alone", rule="", step=step)
    assert len(copies) == 1
    assert journal.events == []
    journal.read_devices()
    assert fields_of(journal, "step") == [7, 290]
    assert len(copies) == 2


def test_the_status_of_a_moment_ago_waits_for_nothing(copies: list[Copy]) -> None:
    rules = load('version: 1\nrules:\n  - {id: a, action: zero, params: "*", at: step}\n').rules
    journal = EventLog(rules, [1])
    for step in range(4):
        journal.count_fired("a", step)
        journal.count_changed("a", torch.ones((), dtype=torch.int64))
    for _ in range(3):  # one transfer at a time
        assert journal.status(wait=False)["a"].changed is None
    (copy,) = copies
    assert not copy.there
    copy.arrive()
    journal.count_changed("a", torch.zeros((), dtype=torch.int64))
    assert journal.status(wait=False)["a"].changed == 1.0
    assert journal.status()["a"].changed == 1.0


def test_events_wait_for_no_device_and_status_does(copies: list[Copy]) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = sgd(model)
    rule = {
        "id": "clip",
        "action": "clip-norm",
        "per": "parameter",
        "params": "*",
        "at": "step",
        "max_norm": 1.0,
    }
    session = gradsurgeon.apply(model, {"version": 1, "rules": [{**rule, "per": "rule"}]})

    def spoil() -> None:
        model.weight.grad = torch.full((1, 2), math.nan)
        optimizer.step()

    spoil()
    assert session.events == []
    copied = len(copies)
    assert copied > 0
    assert not any(copy.there for copy in copies)
    for copy in copies:
        copy.arrive()
    assert fields_of(session, "step") == [0]
    spoil()
    assert len(session.events) == 1
    session.status()
    assert fields_of(session, "step") == [0, 1]
    session.remove()


def test_nothing_is_moved_while_a_graph_is_captured(
    tmp_path: Path, copies: list[Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    rules = load('version: 1\nrules:\n  - {id: norms, action: norm-log, params: "*"}\n').rules
    journal = EventLog(rules, [1])
    recorder = Recorder(Records(), journal, RunWriter(tmp_path, meta=meta()))
    recorder.add(KEY, 0, [0, 1], torch.tensor([0.0, 1.0]), replace=False)
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "is_capturing", lambda: True)
        for _ in range(3):
            now[0] += 5.0
            recorder.end_step()
        recorder.event(Event("trap", "norms", 0, 0, "a.bias", "bad"))
        assert not copies
    with open_run(tmp_path) as run:
        assert fields_of(run, "message") == ["bad"]
        assert not list(run)
    now[0] += 5.0
    recorder.end_step()
    assert len(copies) == 1
    recorder.close()
    with open_run(tmp_path) as run:
        assert run.history("a.bias") == [(0, 1.0)]
