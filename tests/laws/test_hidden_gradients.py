"""What `freeze` and a skipped step hide from an optimizer, the script finds, clears and adds to as without rules."""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from fuzzing import examples
from hidden_scripts import BETWEEN, INSIDE, Iteration, Script, check
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from models import data
from ranks import Json
from small import attach
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
@pytest.mark.parametrize("where", ["before", "after", "in_hook"])
@pytest.mark.parametrize("action", ["clear", "zero", "backward", "raise"])
def test_one_action_in_a_step_that_hides(hidden: str, where: str, action: str) -> None:
    check_one(hidden, where, action)


@pytest.mark.parametrize("hidden", ["frozen", "skipped"])
@pytest.mark.parametrize("where", ["after", "in_hook"])
def test_a_gradient_assigned_in_a_step_that_hides_one(hidden: str, where: str) -> None:
    check_one(hidden, where, "assign")


def check_one(hidden: str, where: str, action: str) -> None:
    happens: Json = {where: action}
    if hidden == "frozen":
        script = Script((replace(Iteration(), **happens),) * 3, frozen=range(2))
    else:
        plain = Iteration(between=())
        hiding = replace(plain, bad=True, **happens)
        script = Script((plain, hiding, plain, plain), traps=True)
    check(script)


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


@pytest.mark.parametrize("entry", [SKIP, FREEZE], ids=["skip", "freeze"])
@pytest.mark.parametrize("where", ["in the step", "in a hook before it", "in a hook after it"])
def test_a_session_that_is_removed_within_a_step(where: str, entry: Json) -> None:
    model, optimizer = make()
    session = attach(model, entry, optimizer=optimizer)
    if where == "in a hook after it":
        # As for each handle of torch, no hook may follow the hook that takes others off.
        hooks = [optimizer.register_step_post_hook(lambda *_: session.remove())]
    else:
        hooks = [optimizer.register_step_post_hook(lambda *_: None)]
    if where == "in the step":
        optimizer.before = session.remove  # type: ignore[method-assign]
    elif where == "in a hook before it":
        hooks.append(optimizer.register_step_pre_hook(lambda *_: session.remove()))
        hooks.append(optimizer.register_step_pre_hook(lambda *_: None))
    backward(model, math.nan if entry is SKIP else 1.0)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.step()
    # The decision of this step stands.
    assert torch.equal(before["bias"], model.bias)
    assert torch.equal(before["weight"], model.weight) == (entry is SKIP)
    assert model.bias.grad is not None
    for handle in hooks:
        handle.remove()
    tables: Any = optimizer
    assert not tables._optimizer_step_pre_hooks
    assert not tables._optimizer_step_post_hooks
    assert "zero_grad" not in vars(optimizer)


def test_a_listener_that_removes_the_session_at_a_trap() -> None:
    model, optimizer = make()
    sessions: list[gradsurgeon.Session] = []
    session = attach(model, SKIP, optimizer=optimizer, on_event=lambda _: sessions[0].remove())
    sessions.append(session)
    backward(model, math.nan)
    optimizer.step()
    assert model.weight.isfinite().all()
    assert model.weight.grad is not None
    assert model.weight.grad.isnan().all()
    optimizer.zero_grad()
    assert model.weight.grad is None


@pytest.mark.parametrize("where", ["update", "later hook"])
@pytest.mark.parametrize("held", [True, False], ids=["error held", "let go"])
def test_hidden_gradients_come_back_where_the_step_raises(where: str, held: bool) -> None:
    model, optimizer = make()

    def fail(*_: object) -> None:
        raise MemoryError

    with attach(model, FREEZE, optimizer=optimizer) as session:
        if where == "update":
            optimizer.before = fail  # type: ignore[method-assign]
        handle = optimizer.register_step_pre_hook(fail)
        if where == "update":
            handle.remove()
        backward(model)
        grad, bias = model.bias.grad, model.bias.detach().clone()
        kept = None
        try:
            optimizer.step()
        except MemoryError as error:
            kept = error if held else None
        handle.remove()
        optimizer.before = lambda: None  # type: ignore[method-assign]
        for steps in (
            1,
            2,
        ):  # an attempt, and one of its own, also while the error is still at hand
            assert model.bias.grad is grad
            assert session.step == steps
            if steps == 1:
                optimizer.step()
        assert torch.equal(model.bias, bias)
        del kept


@pytest.mark.parametrize("fails", [False, True])
def test_two_sessions_that_hide_gradients_of_one_step(fails: bool) -> None:
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = Own([*first.parameters(), *second.parameters()], {})
    sessions = [attach(model, FREEZE, optimizer=optimizer) for model in (first, second)]

    def step() -> None:
        if fails:
            raise RuntimeError("of the script")
        optimizer.zero_grad()

    optimizer.before = step  # type: ignore[method-assign]
    backward(first)
    backward(second)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        optimizer.step()
    for model, session in zip((first, second), sessions, strict=True):
        assert [param.grad is None for param in model.parameters()] == [not fails] * 2
        assert session.step == 1
        session.remove()
    assert "zero_grad" not in vars(optimizer)


def test_a_thread_that_ends_by_the_error_of_its_step() -> None:
    model, optimizer = make()

    def fail() -> None:
        raise RuntimeError("once")

    def step() -> None:
        with suppress(RuntimeError):
            optimizer.step()

    with attach(model, FREEZE, optimizer=optimizer) as session:
        backward(model)
        optimizer.before = fail  # type: ignore[method-assign]
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert model.bias.grad is not None
        assert session.step == 1


def test_a_step_whose_hook_raises_has_taken_place() -> None:
    model, optimizer = make()

    def fail(*_: object) -> None:
        raise RuntimeError("a hook of the script")

    optimizer.register_step_post_hook(fail)
    moved = {"id": "moved", "action": "norm-log", "params": "*", "tensor": "update"}
    with attach(model, moved, FREEZE, optimizer=optimizer) as session:
        backward(model)
        with pytest.raises(RuntimeError, match="a hook of the script"):
            optimizer.step()
        assert model.bias.grad is not None
        assert session.step == 1
        assert session.latest("weight", rule="moved") > 0


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

    def fail() -> None:
        optimizer.before = lambda: None  # type: ignore[method-assign]
        raise KeyError("of the script")

    def broken(**_: object) -> None:
        raise ZeroDivisionError

    optimizer.before = fail  # type: ignore[method-assign]
    with attach(model, FREEZE, optimizer=optimizer) as session:
        backward(model)
        session._attachment.context.recorder.end_step = broken  # type: ignore[method-assign]
        with pytest.raises(KeyError, match="of the script"):
            optimizer.step()
        del session._attachment.context.recorder.end_step
        with pytest.raises(ZeroDivisionError):
            optimizer.step()


def test_a_second_evaluation_that_stops_a_step_teaches_no_bound() -> None:
    model, _ = make()
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    count, factor = [0], 1.0

    def closure() -> float:
        model.zero_grad()
        count[0] += 1
        loss = model(data(0, 8, 4)).square().mean()
        (loss * (factor if count[0] == 2 else 1.0)).backward()
        return float(loss.detach())

    rule = spike_trap("times", "rule", "raise")
    with attach(model, rule, optimizer=optimizer) as session:
        for _ in range(6):
            optimizer.step(closure)
        known = learnt(session)
        count[0], factor = 0, 50.0
        with pytest.raises(gradsurgeon.GradientSpikeError, match="may have moved weights"):
            optimizer.step(closure)
        assert learnt(session) == known
