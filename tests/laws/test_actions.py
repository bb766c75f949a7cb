"""Every action does to a gradient what its own examples say, at every point it may stand at."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from pairs import pairwise
from ranks import Json
from small import sgd
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import Session
from gradsurgeon.actions import ACTIONS, At, ByNorm, Edit, EditRule, Example, LossRule, Rule

CASES = [
    (name, number, point)
    for name, rule in ACTIONS.items()
    for number, example in enumerate(rule.EXAMPLES)
    for point in ([example.options["at"]] if "at" in example.options else rule.points)
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class One(nn.Module):
    def __init__(self, grad: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros_like(grad))


def build(name: str, example: Example, point: str) -> Rule:
    options = {"id": "it", "params": "*", **example.options}
    if ACTIONS[name].takes_at:
        options["at"] = point
    return ACTIONS[name].model_validate(options)


def run_losses(rule: Rule, losses: Mapping[str, Tensor]) -> tuple[One, Session, Exception | None]:
    model = One(next(iter(losses.values())))
    optimizer = sgd(model, 0.0)
    with gradsurgeon.apply(model, [rule], optimizer=optimizer) as session:
        gradsurgeon.backward({name: (grad * model.w).sum() for name, grad in losses.items()})
        optimizer.step()
    return model, session, None


def run(rule: Rule, grad: Tensor) -> tuple[One, Session, Exception | None]:
    model = One(grad)
    optimizer = sgd(model, 0.0)
    error = None
    with gradsurgeon.apply(model, [rule], optimizer=optimizer) as session:
        model.w.backward(grad)
        try:
            optimizer.step()
        except gradsurgeon.TrapError as raised:
            error = raised
    return model, session, error


@pytest.mark.parametrize(("name", "number", "point"), CASES)
def test_examples(name: str, number: int, point: str) -> None:
    example = ACTIONS[name].EXAMPLES[number]
    rule = build(name, example, point)
    if example.losses is None:
        grad = torch.tensor(example.grad)
        model, session, error = run(rule, grad.clone())
        tensor = "w"
    else:
        losses = {loss: torch.tensor(values) for loss, values in example.losses.items()}
        model, session, error = run_losses(rule, losses)
        grad = torch.stack([*losses.values()]).sum(0)
        tensor = "/".join(losses)
    assert model.w.grad is not None
    if example.expect is not None:
        assert model.w.grad.tolist() == pytest.approx(list(example.expect), nan_ok=True)
    elif example.record is not None:
        found = {stat: session.latest(tensor, stat) for stat in example.record}
        assert found == pytest.approx(dict(example.record))
        assert same(model.w.grad, grad)
    else:
        assert example.trips is not None
        tripped = [event.kind for event in session.events if event.kind in ("trap", "spike")]
        assert bool(tripped) == example.trips
        stops = example.options.get("then", "raise") == "raise"
        assert (error is not None) == (example.trips and stops)
        assert same(model.w.grad, grad)
    assert session.status()["it"].fired == 1


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.nan_to_num(9e9), right.nan_to_num(9e9))


def test_every_action_has_examples_of_the_kind_its_role_wants() -> None:
    for name, rule in ACTIONS.items():
        # What hides or keeps a gradient has nothing to show on numbers.
        kinds = {"edit": 0, "observe": 1, "trap": 2}
        assert bool(rule.EXAMPLES) == (rule.role in kinds), name
        for example in rule.EXAMPLES:
            given = (example.expect, example.record, example.trips)
            assert (example.losses is not None) == issubclass(rule, LossRule)
            assert (example.losses is None) == bool(example.grad), name
            made = build(name, example, example.options.get("at", rule.points[0]))
            wanted = 0 if made.edits else kinds[rule.role]
            assert [one is not None for one in given] == [place == wanted for place in range(3)]


# What combines the gradients of losses does nothing to one alone: its laws stand in `test_combine`.
EDITING = [name for name, rule in ACTIONS.items() if issubclass(rule, EditRule)]
NASTY: Json = {
    "empty": torch.empty(0),
    "0-dim": torch.tensor(3.5),
    "zeros": torch.zeros(4),
    "nan": torch.tensor([math.nan, 1.0]),
    "inf": torch.tensor([math.inf, -math.inf, 2.0]),
    "expanded": torch.tensor(2.0).expand(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


def applied(edit: Edit, grad: Tensor) -> Tensor:
    if edit.takes_at:
        return edit.apply(grad, At("w", grad, 0, None))
    return edit.apply(grad)


@pairwise(name=EDITING, shape=NASTY, dtype=DTYPES)
def test_laws_of_an_edit(name: str, shape: str, dtype: torch.dtype) -> None:
    grad = NASTY[shape].to(dtype)
    for number, example in enumerate(ACTIONS[name].EXAMPLES):
        rule = build(name, example, ACTIONS[name].points[0])
        edit = rule.compile()
        if isinstance(edit, ByNorm) or rule.param_problem(["w"], tuple(grad.shape)):
            continue
        assert isinstance(edit, Edit)
        before = grad.clone()
        out = applied(edit, grad)
        # Out of place, and what torch demands of a tensor hook.
        assert same(grad, before), number
        assert (out.shape, out.dtype, out.device) == (grad.shape, grad.dtype, grad.device)
        assert out.data_ptr() != grad.data_ptr() or grad.numel() == 0
        inside = before.clone()
        if edit.apply_ is not None:
            given = (["w"], 0) if edit.takes_at else ()
            edit.apply_([inside], *given)
            assert same(inside, out)
        if rule.keeps_zero:
            zero = torch.zeros(3, dtype=dtype)
            assert same(applied(edit, zero), zero)
        finite = before.isfinite().all()
        if finite and not rule.may_overflow:
            assert out.isfinite().all()
