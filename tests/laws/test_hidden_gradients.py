"""What `freeze` and a skipped step hide from an optimizer, the script finds, clears and adds to as without rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product, repeat
from typing import Any

import pytest
import torch
from fuzzing import examples
from hidden_scripts import BETWEEN, INSIDE, Iteration, Script, check
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from models import data
from ranks import Json
from small import attach, weights_of
from spikes import learnt, spike_trap
from torch import nn

import gradsurgeon

SKIP: Json = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
FREEZE: Json = {"id": "frozen", "action": "freeze", "params": "bias"}
# Code inside a step cannot read the gradients that are hidden from the step, so it cannot clear them by hand, nor assign
# others before the update.
BEFORE = sorted(set(INSIDE) - {"clear by hand", "assign"})
AFTER = sorted(set(INSIDE) - {"clear by hand"})


def mostly(default: str, others: Any) -> st.SearchStrategy[str]:
    return st.one_of(st.just(default), st.just(default), st.sampled_from(others))


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    drops = draw(st.booleans())
    derived = not drops and draw(st.booleans())
    inside = ["nothing"] if drops else BEFORE, ["nothing"] if drops else AFTER
    iteration = st.builds(
        Iteration,
        bad=st.booleans(),
        before=mostly("nothing", inside[0]),
        after=mostly("nothing", inside[1]),
        # The hook is also called around the step of the base class, inside of the step.
        in_hook=mostly("nothing", AFTER if derived else INSIDE),
        between=st.lists(mostly("clear", BETWEEN), max_size=3).map(tuple),
    )
    # Whether a step drops gradients by itself can be seen only in a step that finds some.
    first = Iteration(between=(draw(mostly("clear", ["nothing", "clear by hand"])),))
    more = draw(st.lists(iteration, min_size=1, max_size=5))
    start = draw(st.integers(0, 4))
    return Script(
        iterations=(first, *more),
        frozen=range(start, start + draw(st.integers(0, 3))),
        traps=draw(st.booleans()),
        drops=drops,
        closure=draw(mostly("", ["yes"])) == "yes",
        derived=derived,
    )


@pytest.mark.no_cover  # hundreds of trainings, through lines that other tests cover
@pytest.mark.hypothesis  # the full suite draws all examples
@pytest.mark.parametrize("part", range(3))
def test_scripts_do_what_they_do_by_hand(part: int) -> None:
    @seed(part)
    @settings(
        database=None,
        deadline=None,
        max_examples=examples(300, long=True),
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(script=scripts())
    def held(script: Script) -> None:
        check(script)

    held()


@pytest.mark.parametrize("hidden", ["frozen", "skipped"])
@pytest.mark.parametrize(
    ("where", "action"),
    [
        *product(("before", "after", "in_hook"), ("clear", "zero", "backward", "raise")),
        *product(("after", "in_hook"), ("assign",)),
    ],
)
def test_one_action_in_a_step_that_hides(hidden: str, where: str, action: str) -> None:
    happens: Json = {where: action}
    if hidden == "frozen":
        check(Script((replace(Iteration(), **happens),) * 3, frozen=range(2)))
        return
    plain = Iteration(between=())
    hiding = replace(plain, bad=True, **happens)
    check(Script((plain, hiding, plain, plain), traps=True))


@pytest.mark.parametrize("action", BETWEEN)
def test_one_action_after_a_step_that_raised(action: str) -> None:
    raising = Iteration(before="raise", between=(action,))
    check(Script((raising, Iteration(), Iteration()), frozen=range(2)))
    raising = Iteration(before="raise", bad=True, between=(action,))
    check(Script((Iteration(), raising, Iteration(), Iteration()), traps=True))


def test_an_optimizer_that_drops_each_gradient_it_has_used() -> None:
    plain = Iteration(between=())
    check(Script((plain,) * 5, frozen=range(3), drops=True))
    check(Script((plain, Iteration(bad=True, between=()), plain, plain), traps=True, drops=True))


class Own(torch.optim.Optimizer):
    """Does what a test says before its update."""

    def before(self) -> None:
        """Do nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        self.before()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad)


def make() -> tuple[nn.Linear, Own]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, Own(model.parameters(), {})


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(data(0, 5, 4)).square().mean() * factor).backward()


def fail(*_: object) -> None:
    raise RuntimeError("of the script")


@pytest.mark.parametrize("entry", [SKIP, FREEZE], ids=["skip", "freeze"])
@pytest.mark.parametrize("where", ["in the step", "in a hook before it", "in a hook after it"])
def test_a_session_that_is_removed_within_a_step(where: str, entry: Json) -> None:
    model, optimizer = make()
    session = attach(model, entry, optimizer=optimizer)

    def nothing(*_: object) -> None: ...
    def remove(*_: object) -> None:
        session.remove()

    # As for each handle of torch, no hook may follow the hook that takes others off.
    after = remove if where == "in a hook after it" else nothing
    hooks = [optimizer.register_step_post_hook(after)]
    if where == "in the step":
        optimizer.before = remove  # type: ignore[method-assign]
    elif where == "in a hook before it":
        hooks += [optimizer.register_step_pre_hook(hook) for hook in (remove, nothing)]
    backward(model, math.nan if entry is SKIP else 1.0)
    weight, bias = weights_of(model)
    optimizer.step()
    # The decision of this step stands.
    assert torch.equal(bias, model.bias)
    assert torch.equal(weight, model.weight) == (entry is SKIP)
    assert model.bias.grad is not None
    for handle in hooks:
        handle.remove()
    tables: Any = optimizer
    assert not tables._optimizer_step_pre_hooks
    assert not tables._optimizer_step_post_hooks
    assert "zero_grad" not in vars(optimizer)


def test_a_listener_that_removes_the_session_at_a_trap() -> None:
    model, optimizer = make()
    weight: Any = model.weight
    sessions: list[gradsurgeon.Session] = []
    session = attach(model, SKIP, optimizer=optimizer, on_event=lambda _: sessions[0].remove())
    sessions.append(session)
    backward(model, math.nan)
    optimizer.step()
    assert weight.isfinite().all()
    assert weight.grad.isnan().all()
    optimizer.zero_grad()
    assert weight.grad is None


@pytest.mark.parametrize("where", ["update", "later hook"])
@pytest.mark.parametrize("held", [True, False], ids=["error held", "let go"])
def test_hidden_gradients_come_back_where_the_step_raises(where: str, held: bool) -> None:
    model, optimizer = make()
    with attach(model, FREEZE, optimizer=optimizer) as session:
        handle = optimizer.register_step_pre_hook(fail)
        if where == "update":
            optimizer.before = fail  # type: ignore[method-assign]
            handle.remove()
        backward(model)
        grad = model.bias.grad
        bias = model.bias.detach().clone()
        kept = None
        try:
            optimizer.step()
        except RuntimeError as error:
            kept = error if held else None
        handle.remove()
        optimizer.before = lambda: None  # type: ignore[method-assign]
        # An attempt, and one of its own, also while the error is still at hand.
        assert (model.bias.grad is grad, session.step) == (True, 1)
        optimizer.step()
        assert (model.bias.grad is grad, session.step) == (True, 2)
        assert torch.equal(model.bias, bias)
        del kept


@pytest.mark.parametrize("fails", [False, True])
def test_two_sessions_that_hide_gradients_of_one_step(fails: bool) -> None:
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    optimizer = Own([param for model in models for param in model.parameters()], {})
    sessions = [attach(model, FREEZE, optimizer=optimizer) for model in models]

    def clear() -> None:
        optimizer.zero_grad()

    optimizer.before = fail if fails else clear  # type: ignore[method-assign]
    for model in models:
        backward(model)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        optimizer.step()
    for model, session in zip(models, sessions, strict=True):
        assert [param.grad is None for param in model.parameters()] == [not fails] * 2
        assert session.step == 1
        session.remove()
    assert "zero_grad" not in vars(optimizer)


def test_a_step_whose_hook_raises_has_taken_place() -> None:
    model, optimizer = make()
    optimizer.register_step_post_hook(fail)
    moved = {"id": "moved", "action": "norm-log", "params": "*", "tensor": "update"}
    with attach(model, moved, FREEZE, optimizer=optimizer) as session:
        backward(model)
        with pytest.raises(RuntimeError, match="of the script"):
            optimizer.step()
        assert model.bias.grad is not None
        assert session.step == 1
        assert session.latest("weight", rule="moved") > 0


def test_what_a_hook_writes_after_a_skipped_step_stays() -> None:
    model, optimizer = make()
    (group,) = optimizer.param_groups
    group["lr"] = 1.0

    def anneal(*_: object) -> None:
        group["lr"] *= 0.5

    # This hook comes before the one that ends the step.
    optimizer.register_step_post_hook(anneal)
    with attach(model, SKIP, optimizer=optimizer):
        for factor in (1.0, math.nan, 1.0):
            optimizer.zero_grad()
            backward(model, factor)
            optimizer.step()
    assert group["lr"] == 0.125


def test_a_step_that_gives_a_parameter_another_dtype() -> None:
    model, optimizer = make()
    bias = model.bias

    def convert() -> None:
        bias.data = bias.data.double()

    optimizer.before = convert  # type: ignore[method-assign]
    with attach(model, FREEZE, optimizer=optimizer):
        backward(model)
        optimizer.step()
    assert bias.grad is None
    assert model.weight.grad is not None


def test_the_error_of_the_script_stays_the_error_of_its_step() -> None:
    # A session whose own work at the end of the step fails says so at the next update.
    model, optimizer = make()

    def broken(**_: object) -> None:
        raise ZeroDivisionError

    optimizer.before = fail  # type: ignore[method-assign]
    with attach(model, FREEZE, optimizer=optimizer) as session:
        backward(model)
        recorder: Any = session._attachment.context.recorder
        recorder.end_step = broken
        with pytest.raises(RuntimeError, match="of the script"):
            optimizer.step()
        del recorder.end_step, optimizer.before
        with pytest.raises(ZeroDivisionError):
            optimizer.step()


def test_a_second_evaluation_that_stops_a_step_teaches_no_bound() -> None:
    model, _ = make()
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure(factors: Iterator[float]) -> float:
        model.zero_grad()
        loss = model(data(0, 8, 4)).square().mean() * next(factors)
        loss.backward()
        return float(loss.detach())

    with attach(model, spike_trap("times", "rule", "raise"), optimizer=optimizer) as session:
        for _ in range(6):
            optimizer.step(partial(closure, repeat(1.0)))
        known = learnt(session)
        with pytest.raises(gradsurgeon.GradientSpikeError, match="may have moved weights"):
            optimizer.step(partial(closure, iter([1.0, 50.0])))
        assert learnt(session) == known
