"""Sinks that fail, block or cannot keep up: the script is told, and the training is the same."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_sink import NORMS, ONLY_NORMS, STEPS, TRAP, Kept, fail, frozen, make, step, train
from pairs import singly
from ranks import Json
from small import attach, equal, rule_file

import gradsurgeon
from gradsurgeon import GradSurgeonWarning
from gradsurgeon.records import delivery
from gradsurgeon.runtime import registry

pytestmark = pytest.mark.slow


@singly(method=["scalars", "text", "flush"], recorded=[False, True])
def test_one_that_fails_is_an_event_and_training_is_the_same(
    tmp_path: Any, method: str, *, recorded: bool
) -> None:
    alone, _ = train()
    does: Json = {method: fail}
    broken, fine = Kept(**does), Kept()
    with pytest.warns(GradSurgeonWarning, match="the sink Kept has failed: .*No space left"):
        weights, session = train(broken, fine, record=tmp_path / "run" if recorded else None)
    assert equal(weights, alone)
    (event,) = session.events
    assert (event.kind, event.message) == (
        "notice",
        "the sink Kept has failed: No space left on device; training does not depend on it",
    )
    assert event.step == STEPS
    assert len(fine.curves["gradsurgeon/norms/total"]) == STEPS
    if recorded:
        with gradsurgeon.open_run(tmp_path / "run") as run:
            assert run.events == session.events


def test_one_that_blocks_is_left_alone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_PATIENCE", 0.2)
    alone, _ = train()
    released = threading.Event()
    sink = Kept(scalars=lambda: released.wait(30))
    begin = time.monotonic()
    with pytest.warns(GradSurgeonWarning, match="has not ended after 0.2 seconds"):
        weights, session = train(sink)
    took = time.monotonic() - begin
    released.set()
    assert took < 15
    assert equal(weights, alone)
    assert len(session.events) == 1


@pytest.mark.slow
def test_where_rows_are_left_out_events_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_MOST_WAITING", 100)
    released = threading.Event()
    sink = Kept(text=lambda: released.wait(30))
    model = make()
    optimizer = frozen(model)
    with (
        pytest.warns(GradSurgeonWarning, match="the oldest rows are left out"),
        attach(model, NORMS, TRAP, sinks=[sink]),
    ):
        for number in range(500):
            step(model, optimizer, math.nan if number == 3 else 1.0)
        released.set()
    told = [(at, name) for at, name, _ in sink.texts if "/events/" in name]
    assert (3, "gradsurgeon/events/trap/message") in told
    assert len(sink.curves["gradsurgeon/norms/total"]) < 400


@pytest.mark.parametrize("params", ["*", "2.bias"])
def test_one_that_is_behind_gets_the_worst_of_several_steps(
    monkeypatch: pytest.MonkeyPatch, params: str
) -> None:
    monkeypatch.setattr(delivery, "_MORE_ROWS", 10)
    # Until all of them wait.
    released = threading.Event()
    sink = Kept(text=lambda: released.wait(30))
    model = make()
    optimizer = frozen(model)
    rules = rule_file({**NORMS, "params": params})
    with gradsurgeon.apply(model, rules, sinks=[sink]) as session:
        for number in range(40):
            bad = {17: 100.0, 29: math.nan}
            step(model, optimizer, bad.get(number, 1.0 + number / 100))
        names = ["2.bias"] if params == "2.bias" else [p.name for p in session.plan.manifest.params]
        worst = math.hypot(*(dict(session.history(name))[17] for name in names))
        released.set()
    name = "total" if params == "*" else "2.bias/l2"
    curve = dict(sink.curves[f"gradsurgeon/norms/{name}"])
    assert len(curve) <= 14
    assert curve[17] == pytest.approx(worst)
    assert math.isnan(curve[29])


@pytest.mark.parametrize("replaced", [False, True])
def test_ctrl_c_while_it_waits_for_one_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, replaced: bool
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = make()
    backward = torch.autograd.backward
    session = gradsurgeon.apply(model, ONLY_NORMS, sinks=[Kept()], record=tmp_path / "run")
    step(model, frozen(model))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(delivery.Delivery, "close", interrupt)
        if replaced:
            gradsurgeon.apply(model, ONLY_NORMS, replace=True)
        else:
            session.remove()
    assert not registry.find(model)
    assert torch.autograd.backward is backward
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    with gradsurgeon.open_run(tmp_path / "run") as run:
        assert run.states == {0: "finished"}
