"""What a session tells: records by name, events, and rules that never act."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import CASES, data
from ranks import Json
from small import fields_of, linears, sgd, steps_of, take_step
from torch import nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning, RecordError, Session


def rules(*entries: Json) -> Json:
    return {"version": 1, "rules": [{"params": "*", **entry} for entry in entries]}


NORMS = {"id": "norms", "action": "norm-log"}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    take_step(optimizer, model(data(number, 5, 4)).square().mean())


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = linears(4, 3, 2)
    return model, sgd(model)


def test_the_norm_of_one_weight_right_after_one_backward_with_no_optimizer_in_sight() -> None:
    model = nn.Linear(2, 1)
    with gradsurgeon.apply(model, rules(NORMS)) as session:
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        assert session.latest("weight") == 5.0
        assert session.history("weight") == [(0, 5.0)]


# --- records --------------------------------------------------------------------------------------


def session_with_records() -> Session:
    model, optimizer = make()
    twice = {"id": "final", "action": "norm-log", "at": "step", "params": "0.*"}
    session = gradsurgeon.apply(model, rules(NORMS, {**twice, "stats": ["l2", "max"]}))
    for number in range(3):
        step(model, optimizer, number)
    session.remove()
    return session


def test_records_by_name_rule_and_statistic() -> None:
    session = session_with_records()
    assert steps_of(session, "1.weight") == [0, 1, 2]
    assert session.latest("1.weight") == session.history("1.weight")[-1][1]
    assert session.latest("0.weight", rule="final") == session.latest("0.weight", rule="norms")
    assert len(session.history("0.weight", "max")) == 3


def test_what_is_not_recorded_is_said_with_what_is() -> None:
    session = session_with_records()
    with pytest.raises(
        KeyError, match=r"no parameter '1.weigth' in the model; nearest: 1.weight, "
    ):
        session.latest("1.weigth")
    with pytest.raises(
        RecordError, match=r"l2 of 0.weight is recorded by several rules: .* final, "
    ):
        session.latest("0.weight")
    model, _ = make()
    with (
        gradsurgeon.apply(model, rules(NORMS)) as empty,
        pytest.raises(RecordError, match=r"has not been recorded yet: no gradient has arrived"),
    ):
        empty.latest("0.weight")


# --- status and events ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_status_counts_firings_and_what_is_observed_also_bites(mode: Any) -> None:
    model, optimizer = make()
    bound = {"id": "bound", "action": "clamp", "at": "step", "max": 1e9}
    tight = {"id": "tight", "action": "clamp", "at": "backward", "max": 0.0, "params": "*.weight"}
    with gradsurgeon.apply(model, rules(bound, tight), mode=mode) as session:
        for number in range(4):
            step(model, optimizer, number)
    status = session.status()
    assert (status["bound"].matched, status["bound"].fired) == (4, 16)
    assert (status["tight"].matched, status["tight"].fired) == (2, 8)
    if mode == "act":
        assert status["bound"].changed is status["tight"].changed is None
    else:
        assert status["bound"].changed == 0.0
        assert (status["tight"].changed or 0.0) > 0.5
    assert status["tight"].last_step == 3


def test_a_rule_that_never_fires_is_mentioned_at_the_third_step_with_the_cause() -> None:
    model = CASES["unused"].make()
    optimizer = CASES["unused"].optimizer(model)
    spare = {"id": "spare", "action": "zero", "params": "spare.*"}
    with gradsurgeon.apply(model, rules(spare)) as session:
        for _ in range(2):
            step(model, optimizer)
        assert session.events == []
        with pytest.warns(
            GradSurgeonWarning,
            match=r"rule spare: was due in 3 steps and has not fired yet: no gradient reached any parameter",
        ):
            step(model, optimizer)
        step(model, optimizer)
    assert fields_of(session, "kind", "rule", "step") == [
        ("notice", "spare", 2),
        ("never-fired", "spare", 4),
    ]
    assert session.events[1].message == (
        "was due in 4 steps and never fired: no gradient reached any parameter the rule matched"
    )
    assert session.status()["spare"].warnings


def test_a_rule_that_first_fires_late_has_fired() -> None:
    body, a, b = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)
    model = nn.ModuleDict({"body": body, "a": a, "b": b})
    optimizer = sgd(model, 0.01)
    late = {**NORMS, "id": "late", "params": "b.*"}
    with (
        gradsurgeon.apply(model, rules(late)) as session,
        pytest.warns(
            GradSurgeonWarning, match=r"rule late: was due in 3 steps and has not fired yet"
        ),
    ):
        for number in range(10):
            take_step(optimizer, (a if number < 5 else b)(body(data(number, 2, 3))).sum())
    assert session.status()["late"].fired == 10
    assert fields_of(session, "kind", "rule", "step") == [("notice", "late", 2)]


def test_gradients_that_are_cleared_before_the_update_are_a_cause_of_their_own() -> None:
    model, optimizer = make()
    final = {"id": "final", "action": "norm-log", "at": "step"}
    cause = (
        "the script cleared the gradients between backward and the update: call zero_grad() before backward or after "
        "step()"
    )
    with gradsurgeon.apply(model, rules(NORMS, final)) as session, pytest.warns(GradSurgeonWarning):
        for number in range(5):
            model(data(number, 5, 4)).square().mean().backward()
            optimizer.zero_grad()
            optimizer.step()
    assert fields_of(session, "kind", "rule", "step", "message") == [
        ("notice", "final", 2, f"was due in 3 steps and has not fired yet: {cause}"),
        ("never-fired", "final", 5, f"was due in 5 steps and never fired: {cause}"),
    ]


def test_frozen_for_good_is_a_cause_of_its_own() -> None:
    model = CASES["frozen"].make()
    optimizer = CASES["frozen"].optimizer(model)
    body = {"id": "body", "action": "zero", "params": "body.*"}
    with (
        gradsurgeon.apply(model, rules(body)),
        pytest.warns(GradSurgeonWarning, match="no parameter the rule matched has requires_grad"),
    ):
        for _ in range(3):
            step(model, optimizer)


def test_a_rule_whose_parameters_no_optimizer_owns() -> None:
    # The optimizer over everything would be found, even though nobody uses it.
    model = make()[0]
    optimizer = sgd(model[0])
    late = {"id": "late", "action": "zero", "at": "step", "params": "1.*"}
    first = {"id": "first", "action": "zero", "at": "step", "params": "0.bias"}
    with (
        gradsurgeon.apply(model, rules(late, first)),
        pytest.warns(GradSurgeonWarning, match=r"rule late: .* no optimizer that steps owns any"),
    ):
        for _ in range(4):
            step(model, optimizer)


def test_an_optimizer_of_another_model_is_said_to_be_one() -> None:
    model, _ = make()
    other = sgd(make()[0])
    late = {"id": "late", "action": "zero", "at": "step"}
    with pytest.warns(GradSurgeonWarning, match=r"optimizer SGD holds no parameter of the model"):
        gradsurgeon.apply(model, rules(late), optimizer=other).remove()


def test_a_rule_that_was_never_due_is_mentioned_in_the_end() -> None:
    model, optimizer = make()
    later = {"id": "later", "action": "zero", "steps": {"from": 100}}
    with gradsurgeon.apply(model, rules(later)) as session:
        step(model, optimizer)
    assert fields_of(session, "kind", "rule", "message") == [
        ("never-fired", "later", "was never due in an update that took place")
    ]


def test_an_optimizer_that_never_steps_is_mentioned_in_the_end() -> None:
    model, optimizer = make()
    late = {"id": "late", "action": "zero", "at": "step"}
    session = gradsurgeon.apply(model, rules(NORMS, late))
    for _ in range(4):
        model(data(0, 5, 4)).sum().backward()
    with pytest.warns(GradSurgeonWarning, match="rule late: never fired: no optimizer"):
        session.remove()
    (event,) = session.events
    assert (event.kind, event.rule) == ("never-fired", "late")
    assert "no optimizer that owns its parameters stepped" in event.message
    del optimizer  # alive until here


def test_an_end_without_a_step_that_is_meant_or_explained_warns_of_nothing() -> None:
    model, optimizer = make()
    late = {"id": "late", "action": "zero", "at": "step"}
    with gradsurgeon.apply(model, rules(late)), torch.no_grad():
        model(data(0, 5, 4))
    with pytest.raises(ZeroDivisionError), gradsurgeon.apply(model, rules(late)):
        model(data(0, 5, 4)).sum().backward()
        raise ZeroDivisionError
    del optimizer  # alive until here


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "look"}, r'mode is "act" or "observe", not \'look\''),
        ({"start_step": -1}, "start_step is a number of steps, 0 or more, not -1"),
        ({"start_step": True}, "start_step is a number of steps, 0 or more, not True"),
    ],
)
def test_arguments_that_make_no_sense(options: Json, message: str) -> None:
    model, _ = make()
    with pytest.raises(ValueError, match=message):
        gradsurgeon.apply(model, rules(NORMS), **options)


def test_things_that_are_not_models_optimizers_or_rules() -> None:
    model: Any = make()[0]
    wrong: Any = object()
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, not object"):
        gradsurgeon.apply(wrong, rules(NORMS))
    with pytest.raises(TypeError, match=r"must be torch optimizers, not object"):
        gradsurgeon.apply(model, rules(NORMS), optimizer=wrong)
    with pytest.raises(TypeError, match=r"rules are a path, a text, .*, not object"):
        gradsurgeon.apply(model, wrong)
    with pytest.raises(TypeError, match=r"scaler= must be a torch.amp.GradScaler, not object"):
        gradsurgeon.apply(model, rules(NORMS), scaler=wrong)
