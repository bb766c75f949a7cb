"""Sinks: they get aggregates and events on a thread of their own, and nothing that they do reaches the training."""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from typing import Any

import pytest
import torch
from kept_sink import NORMS, ONLY_NORMS, STEPS, Kept, fail, frozen, make, step, train
from small import attach, hold_rows, take_step
from torch import nn

import gradsurgeon
from gradsurgeon import BindError, GradSurgeonWarning
from gradsurgeon.records import delivery

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def total(session: gradsurgeon.Session, *names: str) -> list[tuple[int, float]]:
    """Return the norm of some gradients together, or of all, by step."""
    histories = [dict(session.history(name)) for name in names or NAMES]
    return [(step, math.hypot(*(of[step] for of in histories))) for step in histories[0]]


TOTAL = "gradsurgeon/norms/total"


def steps_of_curve(sink: Kept, name: str = TOTAL) -> list[int]:
    return [at for at, _ in sink.curves[name]]


def test_it_gets_the_numbers_that_the_session_has() -> None:
    sink = Kept(names=["2.*"])
    _, session = train(sink)
    assert dict(sink.curves[TOTAL]) == pytest.approx(dict(total(session)))
    assert [value for _, value in sink.curves["gradsurgeon/norms/not finite"]] == [0] * STEPS
    last = sorted(session.latest(name) for name in NAMES)
    expected = {"least": last[0], "median": statistics.median(last), "largest": last[-1]}
    assert {kind: sink.curves[f"gradsurgeon/norms/{kind}"][-1][1] for kind in expected} == expected
    assert [name for _, name, _ in sink.texts] == ["gradsurgeon/rules", "gradsurgeon/plan"]
    assert sink.threads.isdisjoint({threading.get_ident()})
    # Tensors get curves only where they are asked for.
    named = {name for name in sink.curves if name.endswith("/l2")}
    assert named == {"gradsurgeon/norms/2.weight/l2", "gradsurgeon/norms/2.bias/l2"}
    assert sink.curves["gradsurgeon/norms/2.bias/l2"] == session.history("2.bias")


def test_a_pattern_that_matches_nothing_is_told() -> None:
    with pytest.warns(
        GradSurgeonWarning, match=r'the sink Kept: names="haed\.\*" matches no tensor'
    ):
        _, session = train(Kept(names=["haed.*", "2.*"]))
    (event,) = session.events
    assert event.kind == "notice"
    # Of modules names are known later.
    outputs = {"id": "outputs", "action": "norm-log", "modules": "*", "tensor": "output"}
    _, session = train(Kept(names=["haed.*"]), rules=[NORMS, outputs])
    assert session.events == []


def test_few_tensors_of_another_statistic_are_a_curve_each_and_many_are_not() -> None:
    few = Kept()
    many = Kept()
    maxima = {"id": "maxima", "action": "norm-log", "params": "*", "stats": ["linf"]}
    _, session = train(few, rules=[maxima])
    assert few.curves["gradsurgeon/maxima/0.bias/linf"] == session.history("0.bias", stat="linf")
    model = nn.ParameterList([nn.Parameter(torch.full((2,), float(i))) for i in range(1, 13)])
    with attach(model, maxima, sinks=[many]):
        take_step(frozen(model), torch.stack([param.square().sum() for param in model]).sum())
    assert many.curves == {
        "gradsurgeon/maxima/linf/not finite": [(0, 0.0)],
        "gradsurgeon/maxima/linf/median": [(0, 13.0)],
        "gradsurgeon/maxima/linf/largest": [(0, 24.0)],
        "gradsurgeon/maxima/linf/least": [(0, 2.0)],
        "gradsurgeon/maxima/loss/loss": [(0, 1300.0)],
        "gradsurgeon/maxima/SGD/0/lr": [(0, 0.0)],
    }


def test_events_are_texts_with_the_diagnosis_and_counts() -> None:
    sink = Kept()
    _, session = train(sink, bad=7)
    trap, skipped, line = session.events
    assert [text for text in sink.texts if "/events/" in text[1]] == [
        (7, "gradsurgeon/events/trap/message", trap.message),
        (7, "gradsurgeon/events/skipped-step/message", skipped.message),
        (7, "gradsurgeon/events/notice/message", line.message),
    ]
    assert "diagnosis" in trap.message
    assert sink.curves["gradsurgeon/events/trap"] == [(7, 1.0)]
    step, value = sink.curves[TOTAL][7]
    assert (step, math.isnan(value)) == (7, True)
    assert sink.curves["gradsurgeon/norms/not finite"][7] == (7, 4.0)


@pytest.mark.parametrize("every", [1, 3])
def test_two_optimizers_are_two_names(every: int) -> None:
    """Where one of them steps in every third iteration their steps are not the same."""
    sink = Kept()
    model = make()
    often = frozen(model[0])
    seldom = frozen(model[2])
    with gradsurgeon.apply(model, ONLY_NORMS, sinks=[sink]) as session:
        for step in range(6):
            seldom.zero_grad()
            take_step(often, model(torch.ones(5, 3)).square().mean() * (step + 1))
            if step % every == 0:
                seldom.step()
    for part, layer in (("", 0), ("part-2/", 2)):
        curve = sink.curves[f"gradsurgeon/norms/{part}total"]
        expected = total(session, f"{layer}.weight", f"{layer}.bias")
        assert dict(curve) == pytest.approx(dict(expected))
        assert len(curve) == len(expected)


def test_a_sum_that_goes_on_is_sent_once() -> None:
    sink = Kept()
    model = make()
    optimizer = frozen(model)
    with gradsurgeon.apply(model, ONLY_NORMS, sinks=[sink]) as session:
        recorder = session._attachment.context.recorder
        for _ in range(2):
            for _ in range(3):
                model(torch.ones(5, 3)).square().mean().backward()
                # As if passes took long: what is there so far would be sent each second.
                recorder._ring.send(wait=True)
                recorder._commit()
                time.sleep(0.05)
            optimizer.step()
            optimizer.zero_grad()
    hold_rows(sink.curves[TOTAL], total(session))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("tensorboard:x", r"sinks= takes a list of sinks, such as .*: str has no names"),
        ([Kept], "type has no names"),
        ([object()], "object has no names, scalars, text, flush, close"),
    ],
)
def test_what_is_no_sink_is_refused(given: Any, text: str) -> None:
    model = make()
    with pytest.raises(TypeError, match=text):
        gradsurgeon.apply(model, ONLY_NORMS, sinks=given)
    assert not model[0].weight._backward_hooks


# -------------------------------------------------------------------------------------------------
# A sink that several sessions have, at once or one after the other.
# -------------------------------------------------------------------------------------------------


def test_a_sink_is_open_for_the_next_session_until_the_process_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Kept()
    broken = Kept(close=fail)
    train(sink, broken)
    _, session = train(sink)
    assert session.events == []
    assert len(sink.curves[TOTAL]) == 2 * STEPS
    assert sink.closed == 0
    delivery.close_all()  # as at exit
    delivery.close_all()
    assert sink.closed == 1
    assert "the sink Kept could not be closed" in caplog.text


def test_one_of_a_rank_that_sends_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    sink = Kept()
    train(sink)
    delivery.close_all()
    assert (sink.texts, sink.closed) == ([], 1)


def test_a_name_is_given_again_only_once_it_is_free() -> None:
    sink = Kept()
    models = [make() for _ in range(3)]
    first, second = (gradsurgeon.apply(m, ONLY_NORMS, sinks=[sink]) for m in models[:2])
    first.remove()
    third = gradsurgeon.apply(models[2], ONLY_NORMS, sinks=[sink])
    step(models[1], frozen(models[1]), 2.0)
    optimizer = frozen(models[2])
    for _ in range(3):
        step(models[2], optimizer)
    second.remove()
    third.remove()
    assert steps_of_curve(sink) == [0, 1, 2]
    # Two models at once have curves of their own.
    ((at, norm),) = sink.curves["gradsurgeon/model-2/norms/total"]
    assert at == 0
    assert norm == pytest.approx(2 * sink.curves[TOTAL][0][1])


def test_a_session_that_does_not_begin_leaves_it_open() -> None:
    sink = Kept()
    model = make()
    with gradsurgeon.apply(model, ONLY_NORMS):
        before = threading.active_count()
        with pytest.raises(BindError):
            attach(model, {**NORMS, "params": "nowhere"}, sinks=[sink], replace=True)
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
