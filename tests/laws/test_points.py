"""Section 5 of the rule language: what `backward`, `accumulated` and `step` mean in every loop."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ranks import Json
from small import attach, fields_of, kinds_of, messages, rule_file, take_step
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import (
    GradSurgeonError,
    GradSurgeonWarning,
    NonFiniteGradientError,
)


class Weight(nn.Module):
    """One number per parameter, so that gradients can be written down."""

    w: Tensor
    a: Tensor
    b: Tensor
    g: Tensor
    d: Tensor

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or ("w",):
            self.register_parameter(name, nn.Parameter(torch.zeros(1)))


HALF: Json = {"id": "half", "action": "scale", "params": "*", "factor": 0.5, "at": "step"}
NORMS: Json = {"id": "norms", "action": "norm-log", "params": "*"}
SKIP: Json = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
NAN = float("nan")


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def backward(model: Weight, factor: float = 4.0) -> None:
    (model.w * factor).sum().backward()


# --- accumulation ---------------------------------------------------------------------------------


@pytest.mark.cell(
    "accumulation",
    "backward",
    differs="bounds each backward pass, not the sum, with one warning; `scale` and `zero` mean the same as at `step`",
)
@pytest.mark.cell("accumulation", "step")
@pytest.mark.cell(
    "accumulation", "accumulated", differs="the record of a step comes from its last pass"
)
@pytest.mark.cell("one process", "accumulated")
@pytest.mark.parametrize(
    ("at", "moved"),
    [("step", 1.0), ("backward", 1.5)],  # the bound of the sum, and the sum of bounded parts
)
def test_bounds_and_records_at_each_point_under_accumulation(at: str, moved: float) -> None:
    model = Weight()
    optimizer = sgd(model)
    bound = {"id": "bound", "action": "clamp", "params": "*", "min": -2.5, "max": 2.5, "at": at}
    each = {**NORMS, "id": "each", "at": "backward"}
    with attach(model, NORMS, each, bound) as session:
        with pytest.warns(GradSurgeonWarning) if at == "backward" else nullcontext():
            for part in (2.0, 2.0, -3.0):
                backward(model, part)
        optimizer.step()
    assert -model.w.item() == moved
    said = [(e.kind, e.rule) for e in session.events if "bounds the contribution" in e.message]
    assert said == ([("notice", "bound")] if at == "backward" else [])
    assert session.history("w", rule="norms") == [(0, 1.5 if at == "backward" else 1.0)]
    assert session.history("w", rule="each") == [(0, 2.0), (0, 2.0), (0, 3.0)]


# --- closures -------------------------------------------------------------------------------------


def test_a_closure_by_keyword_and_a_dummy_closure() -> None:
    model = Weight()
    optimizer: Any = sgd(model)

    def closure() -> float:
        optimizer.zero_grad()
        backward(model)
        return 0.0

    with attach(model, HALF) as session:
        optimizer.step(closure=closure)
        assert -model.w.item() == 2.0
        closure()
        # Frameworks pass such a one where the script has run backward by itself.
        optimizer.step(lambda: None)
        assert -model.w.item() == 4.0
    assert session.step == 2


# --- closures -------------------------------------------------------------------------------------


class Sharp(torch.optim.SGD):
    """Moves the weights, evaluates the closure there, and moves back, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            param.add_(0.1)
        with torch.enable_grad():
            loss = closure()
        for param in params:
            if param.grad is not None:
                param.sub_(0.1)
        super().step()
        return loss


@pytest.mark.parametrize("then", ["skip-step", "raise"])
def test_a_step_that_has_moved_weights_raises_and_says_so(then: str) -> None:
    model = Weight()
    optimizer = Sharp(model.parameters(), lr=1.0)

    def closure() -> None:
        optimizer.zero_grad()
        backward(model, NAN)

    with (
        attach(model, {**SKIP, "then": then}, optimizer=optimizer) as session,
        pytest.raises(NonFiniteGradientError) as raised,
    ):
        optimizer.step(closure)
    # Nothing tells of a skipped step, or of weights that were not moved.
    assert str(raised.value).split("\n")[1] == (
        "stopped within the step: the optimizer evaluates its closure late, or several times, and may have moved weights in "
        "this step already"
    )
    assert fields_of(session, "kind", "message") == [("trap", str(raised.value))]
    assert session.step == 1


# --- several optimizers, several models -----------------------------------------------------------


def test_one_optimizer_over_two_models() -> None:
    first = Weight()
    second = Weight()
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.1)
    ends = []
    with attach(first, SKIP) as one, attach(second, NORMS) as two:
        for factor in (1.0, NAN, 1.0):
            take_step(optimizer, (first.w * factor + second.w).sum())
            ends.append((first.w.item(), second.w.item()))
        assert kinds_of(one) == ["trap", "skipped-step"]
        assert (one.step, two.step) == (3, 3)
    # A skipped step moves nothing that the optimizer owns, the other model included.
    assert ends[0] == ends[1]
    assert ends[2][0] != ends[1][0]
    assert ends[2][1] != ends[1][1]


def test_an_optimizer_that_comes_late_has_a_clock_from_the_start() -> None:
    model = Weight("a", "b")
    optimizers = [torch.optim.SGD([model.a], lr=1.0)]
    with (
        attach(model, {**HALF, "steps": {"to": 2}}) as session,
        pytest.warns(
            GradSurgeonWarning,
            match="gradients come to b, but no optimizer that has stepped owns",
        ),
    ):
        for step in range(8):
            if step == 4:
                optimizers.append(torch.optim.SGD([model.b], lr=1.0))
            model.zero_grad()
            (model.a + model.b).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert session.step == 8
    assert (-model.a.item(), -model.b.item()) == (7.0, 3.0)


class Outer(torch.optim.SGD):
    """Its `step` calls the one it inherits: torch runs step hooks for both."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_within_a_step_is_one_step() -> None:
    sgd(Weight())  # torch patches the inherited `step` when somebody makes a plain one
    model = Weight()
    optimizer = Outer(model.parameters(), lr=1.0)
    with attach(model, HALF) as session:
        for _ in range(2):
            take_step(optimizer, (model.w * 4.0).sum())
        assert session.step == 2
    assert -model.w.item() == 4.0


class Wrapper(torch.optim.Optimizer):
    """As trainers wrap optimizers: a torch optimizer by type, which skips the constructor."""

    def __init__(self, inner: torch.optim.Optimizer, *, hidden: bool) -> None:
        self.param_groups = inner.param_groups
        self.inner: Any = [inner] if hidden else inner

    def step(self, closure: Any = None) -> Any:
        return (self.inner[0] if isinstance(self.inner, list) else self.inner).step(closure)


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
def test_a_wrapper_and_the_optimizer_inside_are_one(named: bool) -> None:
    model = Weight()
    optimizer = Wrapper(sgd(model), hidden=False)
    with attach(model, HALF, optimizer=optimizer if named else None) as session:
        for _ in range(2):
            model.zero_grad()
            backward(model)
            optimizer.step()
    assert (session.step, session.events, -model.w.item()) == (2, [], 4.0)
    assert not optimizer.inner._optimizer_step_pre_hooks


def test_a_wrapper_that_hides_its_optimizer_does_not_stand_in_the_way() -> None:
    model = Weight()
    optimizer = Wrapper(sgd(model), hidden=True)
    with attach(model, HALF) as session:
        backward(model)
        optimizer.step()
    assert (session.events, -model.w.item()) == ([], 2.0)
    with pytest.warns(GradSurgeonWarning, match="pass the optimizer that it wraps"):
        attach(model, HALF, optimizer=optimizer).remove()


# --- no optimizer ---------------------------------------------------------------------------------


def update_by_hand(model: Any, *, in_place: bool = False) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad)
            if in_place:
                param.grad.zero_()
            else:
                param.grad = None


@pytest.mark.cell(
    "updates written by hand",
    "step",
    differs="each backward pass counts as a step, unless `session.tick()` marks steps; `freeze` is refused",
)
@pytest.mark.parametrize("in_place", [True, False], ids=["zeroed in place", "set to None"])
def test_hand_written_updates(in_place: bool) -> None:
    model = Weight()
    with attach(model, HALF, NORMS) as session:
        for _ in range(3):
            backward(model)
            update_by_hand(model, in_place=in_place)
    assert -model.w.item() == 6.0
    assert session.step == 3
    assert session.history("w") == [(0, 4.0), (1, 4.0), (2, 4.0)]
    (notice,) = messages(session, "notice")
    assert "no torch optimizer owns the parameters" in notice


@pytest.mark.cell(
    "updates written by hand",
    "step",
    refused="a second pass onto an edited gradient, without ticks: the edit would compound",
)
@pytest.mark.parametrize(("edited", "left"), [(True, 6.0), (False, 8.0)])
def test_a_second_pass_onto_an_edited_or_old_gradient_is_an_error(
    edited: bool, left: float
) -> None:
    model = Weight()
    if not edited:
        backward(model)
    with attach(model, HALF):
        if edited:
            backward(model)
        with pytest.raises(
            GradSurgeonError, match=r"reached w while .* would compound\. .*optimizer=\[\]"
        ):
            backward(model)
    # What was there is there with what has been added to it.
    assert model.w.grad is not None
    assert model.w.grad.item() == left


def test_a_second_pass_without_edits_is_a_step_of_its_own() -> None:
    model = Weight()
    with attach(model, NORMS) as session:
        for _ in range(2):
            backward(model)
            backward(model)
            update_by_hand(model)
    assert session.history("w") == [(0, 4.0), (1, 8.0), (2, 4.0), (3, 8.0)]
    assert session.step == 4


def test_a_trap_judges_a_second_pass_by_hand_as_well() -> None:
    model = Weight()
    with attach(model, {**SKIP, "then": "raise"}):
        backward(model)
        update_by_hand(model)
        backward(model)
        with pytest.raises(NonFiniteGradientError, match=r"^step 2, rule trap: 1 of 1"):
            backward(model, NAN)


def test_ticks_mark_the_steps() -> None:
    model = Weight()
    with attach(model, HALF, NORMS, optimizer=[]) as session:
        for step in range(3):
            backward(model)
            backward(model)
            assert session.step == step
            assert session.tick() is True
            update_by_hand(model)
    assert -model.w.item() == 12.0
    assert session.history("w") == [(0, 8.0), (1, 8.0), (2, 8.0)]
    assert session.events == []


def test_a_tick_after_an_undeclared_start_does_not_count_twice() -> None:
    model = Weight()
    with attach(model, HALF) as session:
        for _ in range(3):
            backward(model)
            session.tick()
            update_by_hand(model)
        assert session.step == 3
    assert -model.w.item() == 6.0


@pytest.mark.parametrize("then", ["skip-step", "raise"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_tick_says_whether_to_update(declared: bool, then: str) -> None:
    """Also a first tick, of a pass that a trap has stopped."""
    model = Weight()
    stops = pytest.raises(NonFiniteGradientError)
    with attach(model, {**SKIP, "then": then}, optimizer=[] if declared else None) as session:
        with nullcontext() if declared else stops:
            backward(model, NAN)
        with stops if declared and then == "raise" else nullcontext():
            assert session.tick() is False
        model.w.grad = None
        backward(model)
        assert session.tick() is True
    assert session.step == 2


def test_skip_step_without_optimizer_raises_rather_than_pretend() -> None:
    model = Weight()
    with attach(model, SKIP) as session:
        backward(model)
        model.w.grad = None
        with pytest.raises(NonFiniteGradientError, match=r"step 1, rule trap: 1 of 1") as caught:
            backward(model, float("inf"))
    assert "`then: skip-step` cannot hide gradients from a manual update" in str(caught.value)
    assert (caught.value.rule, caught.value.step, caught.value.name) == ("trap", 1, "w")
    assert session.step == 2


def test_ticks_are_refused_where_an_optimizer_steps() -> None:
    model = Weight()
    optimizer = sgd(model)
    with attach(model, HALF) as session:
        take_step(optimizer, model.w.sum())
        with pytest.raises(GradSurgeonError, match="a torch optimizer owns the parameters"):
            session.tick()


def test_an_optimizer_made_after_the_first_backward_says_what_its_first_update_gets() -> None:
    model = Weight()
    with attach(model, HALF) as session:
        backward(model)
        optimizer = sgd(model)
        with pytest.warns(GradSurgeonWarning, match="act on them again in the first update"):
            optimizer.step()
        # The pass was counted as a step, and what was counted stays counted.
        assert session.step == 2
        before = model.w.item()
        take_step(optimizer, (model.w * 4.0).sum())
    assert before - model.w.item() == 2.0
    assert session.step == 3
    assert "the backward passes before it were counted as steps" in session.events[-1].message


# --- the clock ------------------------------------------------------------------------------------


def test_pause_and_resume_keep_the_clock_without_an_optimizer() -> None:
    model = Weight()
    ends = []
    with attach(model, HALF, NORMS) as session:
        for step in range(5):
            if step == 2:
                session.pause()
            if step == 4:
                session.resume()
            backward(model, 1.0)
            update_by_hand(model)
            ends.append(-model.w.item())
        assert session.step == 5
    assert ends == [0.5, 1.0, 2.0, 3.0, 3.5]
    assert session.history("w") == [(0, 1.0), (1, 1.0), (4, 1.0)]


# --- the clock ------------------------------------------------------------------------------------


def test_what_came_before_rules_that_begin_inside_a_pass_is_no_part_of_the_next_one() -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    sessions: list[gradsurgeon.Session] = []
    norms = rule_file({**NORMS, "at": "backward"})

    def begin(_: Tensor) -> None:
        if not sessions:
            sessions.append(gradsurgeon.apply(model, norms))

    for _ in range(2):
        optimizer.zero_grad()
        out = model(torch.ones(1, 2))
        out.register_hook(begin)
        out.sum().backward()
    optimizer.step()
    assert sessions[0].events == []
    assert len(sessions[0].history("weight")) == 1
    sessions[0].remove()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_made_for_inference_is_replaced_as_without_rules() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.inference_mode():
        model.weight.grad = torch.zeros(1, 2)
    with attach(model, NORMS, optimizer=[]) as session:
        model(torch.ones(1, 2)).square().sum().backward(create_graph=True)
        assert len(session.history("weight")) == 1
    model.weight.grad = None
