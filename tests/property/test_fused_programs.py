"""Programs in which rules run together do what the rules do one by one, and report the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon.planning import Plan
from gradsurgeon.runtime import Session, deciding
from gradsurgeon.runtime.state import Mode

SETTINGS = settings(derandomize=True, deadline=None, max_examples=examples(120))
STEPS = 3
SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "plain": (torch.float32, (3,)),
    "wide": (torch.float64, (2, 2)),
    "brain": (torch.bfloat16, (4,)),
    "number": (torch.float32, ()),
    "nothing": (torch.float32, (0,)),
}


class Several(nn.Module):
    def __init__(self, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        super().__init__()
        for name, (kind, shape) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=kind)))


NASTY = [math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0**-149, 2.0**-140, 2.0**-1074, 3e38, -1.0]
ELEMENTS = st.one_of(st.sampled_from(NASTY), st.integers(-40, 40).map(lambda whole: whole / 8))
# With powers of two, rounding once is rounding twice.
FACTORS = st.sampled_from([0.0, 0.25, 0.5, -0.5, 1.0, -1.0, 2.0, -4.0, 2.0**-100, 2.0**100])
BOUNDS = st.sampled_from([None, -3.0, -1.0, -0.1, 0.0, 0.1, 0.5, 1.0, 2.5, 1e30])
SCHEDULES = st.sampled_from([{}, {}, {}, {"from": 1}, {"every": 2}])
NAMES = st.one_of(
    st.just(["*"]),
    st.just(["*"]),
    st.lists(st.sampled_from(list(SHAPES)), min_size=1, max_size=4, unique=True),
)


def action(name: str, **options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    both = {"at": st.sampled_from(["backward", "step"]), "params": NAMES, "steps": SCHEDULES}
    return st.fixed_dictionaries({"action": st.just(name), **both, **options})


@st.composite
def clamps(draw: st.DrawFn) -> dict[str, Any]:
    low, high = draw(st.tuples(BOUNDS, BOUNDS).filter(any))
    if low is not None and high is not None:
        low, high = sorted((low, high))
    bounds = {"min": low, "max": high}
    return draw(action("clamp")) | {k: v for k, v in bounds.items() if v is not None}


EDITS = st.one_of(
    clamps(),
    clamps(),
    action("scale", factor=FACTORS),
    action("scale", factor=FACTORS),
    action("zero"),
    action("clip-norm", max_norm=st.sampled_from([0.0, 0.5, 2.0])),
    action("clip-norm", max_norm=st.just(1.0), per=st.just("rule"), at=st.just("step")),
    action("sanitize", at=st.just("backward")),
)
OBSERVERS = st.one_of(
    action("norm-log", stats=st.just(["linf", "zeros"])), action("capture", max_bytes=st.just(9999))
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Draw rule files; in most of them rules act at one point, in the same steps."""
    kind = draw(st.sampled_from(["neighbours", "neighbours", "anything"]))
    if kind == "anything":
        found = draw(st.lists(st.one_of(EDITS, EDITS, EDITS, OBSERVERS), min_size=2, max_size=6))
    else:
        point = draw(st.sampled_from(["backward", "step"]))
        common = {"at": point, "steps": draw(SCHEDULES)}
        some = EDITS.filter(lambda one: point == "backward" or one["action"] != "sanitize")
        some = some.filter(lambda one: point == "step" or "per" not in one)
        found = [one | common for one in draw(st.lists(some, min_size=2, max_size=6))]
    return {"version": 1, "rules": [{"id": f"r{n}", **one} for n, one in enumerate(found)]}


def gradients(draw: st.DrawFn, model: nn.Module) -> list[list[Tensor]]:
    def one(param: Tensor) -> Tensor:
        count = param.numel() * (2 if param.is_complex() else 1)
        elements = torch.tensor(draw(st.lists(ELEMENTS, min_size=count, max_size=count)))
        if param.is_complex():
            return torch.view_as_complex(elements.float().view(-1, 2)).view(param.shape)
        return elements.to(param.dtype).view(param.shape)

    return [[one(param) for param in model.parameters()] for _ in range(STEPS)]


def train(
    plan: Plan, model: nn.Module, grads: list[list[Tensor]], *, mode: Mode = "act", optimize: bool
) -> tuple[list[Tensor], Session]:
    """Return the final gradients of every step, and the session that saw them."""
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.0)
    session = Session(
        model, plan, optimizers=[optimizer], mode=mode, start_step=0, optimize=optimize
    )
    session.attach(lambda: None)
    finals = []
    with session:
        for own in grads:
            optimizer.zero_grad()
            torch.autograd.backward(params, [grad.clone() for grad in own])
            optimizer.step()
            finals += [param.grad.clone() for param in params if param.grad is not None]
    return finals, session


def same(left: Tensor, right: Tensor) -> bool:
    """Tell whether all elements are equal, NaN to NaN, and zeros of either sign."""
    nans = left.isnan()
    return (
        left.dtype == right.dtype
        and torch.equal(nans, right.isnan())
        and torch.equal(left[~nans], right[~nans])
    )


def told(session: Session) -> tuple[object, ...]:
    """Return everything that a session reports, but for captured tensors."""
    series = {one.key: [str(one.of(name)) for name in one.key.names] for one in session.records}
    return session.status(), session.events, series


@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
@SETTINGS
@given(st.data())
def test_the_fused_program_does_what_the_naive_one_does(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # As if some gradients had many elements.
        patch.setattr(deciding, "_SMALL", data.draw(st.sampled_from([0, deciding._SMALL])))
        check(data)


def check(data: st.DataObject) -> None:
    document = data.draw(documents())
    rules = gradsurgeon.load(document)
    shapes = dict(SHAPES)
    # Half of an infinite complex number is NaN in one of its parts, half of that in both.
    if not any(rule.complex_problem() or rule.role == "observe" for rule in rules.rules):
        shapes["twofold"] = (torch.complex64, (2,))
    models = [Several(shapes), Several(shapes)]
    plan = gradsurgeon.plan(models[0], rules)
    grads = data.draw(st.composite(gradients)(models[0]))
    mode: Mode = data.draw(st.sampled_from(["act", "act", "observe"]))
    fused, session = train(plan, models[0], grads, mode=mode, optimize=True)
    naive, by_itself = train(plan, models[1], grads, mode=mode, optimize=False)
    assert all(map(same, fused, naive))
    assert told(session) == told(by_itself)
    for rule in rules.rules:
        if rule.role == "capture":
            kept, expected = session.captured(rule.id), by_itself.captured(rule.id)
            assert kept.keys() == expected.keys()
            assert all(same(kept[key], expected[key]) for key in kept)


HALVES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ANY_FACTOR = st.one_of(
    st.floats(1e-6, 1e6),
    st.floats(-1.0, 1.0),
    st.sampled_from([0.0, 1e-30, 1e30, -1e-200, 1e300, 65504.0, 2.0**-14, 1.0 + 2.0**-52]),
)


@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
@SETTINGS
@given(st.data())
def test_factors_made_one_differ_by_rounding_only(data: st.DataObject) -> None:
    factors = data.draw(st.lists(ANY_FACTOR, min_size=2, max_size=4))
    point = data.draw(st.sampled_from(["backward", "step"]))
    rules = [
        {"id": f"r{n}", "action": "scale", "params": "*", "at": point, "factor": factor}
        for n, factor in enumerate(factors)
    ]
    kind = data.draw(st.sampled_from(HALVES))
    models = [Several({"weight": (kind, (6,))}) for _ in range(2)]
    plan = gradsurgeon.plan(models[0], {"version": 1, "rules": rules})
    grads = data.draw(st.composite(gradients)(models[0]))
    fused, session = train(plan, models[0], grads, optimize=True)
    naive, by_itself = train(plan, models[1], grads, optimize=False)
    limits = torch.finfo(kind)
    # Below the normal numbers it is not the digits that are limited, but the last place.
    last = 4 * limits.smallest_normal * limits.eps
    for one, other in zip(fused, naive, strict=True):
        torch.testing.assert_close(one, other, rtol=4 * limits.eps, atol=last, equal_nan=True)
    if len(factors) == 2:  # with more of them some see what was rounded once
        assert session.status() == by_itself.status()
