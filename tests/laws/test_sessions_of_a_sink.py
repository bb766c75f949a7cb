"""A sink that several sessions have, at once or one after the other."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch
from kept_sink import NORMS, ONLY_NORMS, STEPS, Kept, fail, frozen, make, step, train

import gradsurgeon
from gradsurgeon.sinks import open_sinks


def test_a_sink_is_open_for_the_next_session_until_the_process_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink, broken = Kept(), Kept(close=fail)
    train(sink, broken)
    _, session = train(sink)
    assert session.events == []
    assert len(sink.curves["gradsurgeon/norms/total"]) == 2 * STEPS
    assert sink.closed == 0
    open_sinks.close_all()  # as at exit
    open_sinks.close_all()
    assert sink.closed == 1
    assert "the sink Kept could not be closed" in caplog.text


@pytest.mark.parametrize("interactive", [False, True])
def test_one_that_asks_is_told_what_has_ended_the_process(
    monkeypatch: pytest.MonkeyPatch, *, interactive: bool
) -> None:
    class Asking(Kept):
        ended: BaseException | None = None

        def close_at_exit(self, error: BaseException | None) -> None:
            self.ended = error

    sink, error = Asking(), ZeroDivisionError()
    train(sink)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    if interactive:  # where it has only ended a cell
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    open_sinks.close_all()
    assert sink.ended is (None if interactive else error)
    assert sink.closed == 0


def test_one_of_a_rank_that_sends_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    sink = Kept()
    train(sink)
    open_sinks.close_all()
    assert (sink.texts, sink.closed) == ([], 1)


def test_two_models_at_once_have_curves_of_their_own() -> None:
    sink = Kept()
    models = [make(), make()]
    sessions = [gradsurgeon.apply(model, ONLY_NORMS, sinks=[sink]) for model in models]
    for scale, model in enumerate(models, 1):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        (model(torch.ones(5, 3)).sum() * scale).backward()
        optimizer.step()
    for session in sessions:
        session.remove()
    ((_, one),) = sink.curves["gradsurgeon/norms/total"]
    ((_, two),) = sink.curves["gradsurgeon/model-2/norms/total"]
    assert two == pytest.approx(2 * one)


def test_a_name_is_given_again_only_once_it_is_free() -> None:
    sink = Kept()
    models = [make() for _ in range(3)]
    first, second = (gradsurgeon.apply(m, ONLY_NORMS, sinks=[sink]) for m in models[:2])
    first.remove()
    third = gradsurgeon.apply(models[2], ONLY_NORMS, sinks=[sink])
    step(models[1], frozen(models[1]))
    optimizer = frozen(models[2])
    for _ in range(3):
        step(models[2], optimizer)
    second.remove()
    third.remove()
    steps = {name: [at for at, _ in curve] for name, curve in sink.curves.items()}
    assert steps["gradsurgeon/norms/total"] == [0, 1, 2]
    assert steps["gradsurgeon/model-2/norms/total"] == [0]


def test_rules_that_replace_others_go_on_with_their_curves() -> None:
    sink, model = Kept(), make()
    for begin in (0, 1):
        session = gradsurgeon.apply(model, ONLY_NORMS, sinks=[sink], replace=True, start_step=begin)
        step(model, frozen(model))
    session.remove()
    assert [at for at, _ in sink.curves["gradsurgeon/norms/total"]] == [0, 1]
    assert not [name for name in sink.curves if "model-2" in name]


def test_a_session_that_is_refused_has_written_nothing() -> None:
    sink = Kept()
    sanitize = {"id": "clean", "action": "sanitize", "params": "*"}
    with pytest.raises(gradsurgeon.BindError):
        gradsurgeon.apply(
            make(),
            {"version": 1, "rules": [sanitize]},
            sinks=[sink],
            scaler=torch.amp.GradScaler("cpu"),
        )
    train(sink)
    assert [name for _, name, _ in sink.texts if name.endswith("/rules")] == ["gradsurgeon/rules"]


def test_a_session_that_does_not_begin_leaves_it_open() -> None:
    sink = Kept()
    model = make()
    with gradsurgeon.apply(model, ONLY_NORMS):
        before = threading.active_count()
        with pytest.raises(gradsurgeon.BindError):
            gradsurgeon.apply(
                model,
                {"version": 1, "rules": [{**NORMS, "params": "nowhere"}]},
                sinks=[sink],
                replace=True,
            )
    assert sink.closed == 0
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_forked_process_sends_nothing_and_does_not_wait() -> None:
    sink = Kept()
    model = make()
    with gradsurgeon.apply(model, ONLY_NORMS, sinks=[sink]) as session:
        if (child := os.fork()) == 0:
            try:
                session.remove()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
    assert status == 0
    assert sink.closed == 0
