"""Of which update a gradient is judged as a part of, and in which statistic of `spike-trap` it enters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from models import data
from pairs import singly
from ranks import Json
from running_bounds import ByHand
from spikes import (
    ABOVE,
    FACTORS,
    PER,
    RULES,
    assert_same,
    backward,
    grads,
    learnt,
    make,
    rules,
    same_as,
    spike_trap,
    statistics_of,
)
from torch import nn

import gradsurgeon

# --- whose update it is ---------------------------------------------------------------------------


KINDS = ["two", "rebuilt", "group added later", "one made two", "a second one of a part"]


def sgd(*layers: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.05)


def optimizers(kind: str, model: Any) -> Iterator[list[torch.optim.Optimizer]]:
    """Yield the optimizers of each step."""
    held = [sgd(model[0]), sgd(model[2])] if kind == "two" else [sgd(model)]
    if kind == "group added later":
        held = [sgd(model[0])]
    for step in range(len(FACTORS)):
        if kind == "rebuilt" and step in (3, 8):
            held = [sgd(model)]
        if kind == "group added later" and step == 10:
            held[0].add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
        if kind == "one made two" and step == 6:
            held = [sgd(model[0]), sgd(model[2])]
        if kind == "a second one of a part" and step == 5:
            held.append(sgd(model[0]))
        yield held


def renewed(session: gradsurgeon.Session, model: nn.Module, rule: Json, **more: Any) -> Any:
    """Return a session that goes on with the state of another one."""
    state = session.state_dict()
    session.remove()
    session = gradsurgeon.apply(model, rules(rule), **more)
    session.load_state_dict(state)
    return session


@pytest.mark.filterwarnings("ignore:rule spikes. gradients come to")
@singly(kind=KINDS, above=ABOVE, per=PER, then=["clip", "skip-step"], resumed=[False, True])
def test_each_optimizer_has_a_bound_and_goes_on_with_it(
    kind: str, above: str, per: str, then: str, resumed: bool
) -> None:
    rule = spike_trap(above, per, then)
    model = make()
    wanted = make()
    session = gradsurgeon.apply(model, rules(rule))
    for step, held in enumerate(optimizers(kind, model)):
        if resumed and step == 8:
            session = renewed(session, model, rule)
        backward(model, step)
        for optimizer in held:
            optimizer.step()
    session.remove()
    hands: list[ByHand] = []
    cut = 0
    names = {id(param): name for name, param in wanted.named_parameters()}
    for step, held in enumerate(optimizers(kind, wanted)):
        backward(wanted, step)
        known = ByHand(**rule).taught_by(hands[:1])
        for number, optimizer in enumerate(held):
            if number == len(hands):
                # What it has learnt by then of its part, of which the first one goes on as well.
                both = kind == "a second one of a part"
                hands.append(ByHand(**rule).taught_by(hands[:1] if both else [known]))
            if (kind, per, step) == ("group added later", "rule", 10):
                # A norm over more gradients is another quantity.
                cut += hands[number].cut
                hands[number] = ByHand(**rule)
            owned = [p for group in optimizer.param_groups for p in group["params"]]
            if hands[number].judge({names[id(param)]: param.grad for param in owned}):
                optimizer.step()
                hands[number].learn()
    assert_same(model.parameters(), wanted.parameters())
    assert cut + sum(hand.cut for hand in hands) > 1


@pytest.mark.parametrize("above", ABOVE)
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("resumed", [False, True], ids=["unbroken", "resumed"])
def test_of_two_optimizers_made_one_no_norm_over_all_is_known(
    above: str, per: str, resumed: bool
) -> None:
    """What has been learnt of the norm of one of them says nothing of that of both."""
    rule = spike_trap(above, per, "clip")
    model: Any = make()
    session = gradsurgeon.apply(model, rules(rule))
    for step in range(len(FACTORS)):
        if resumed and step == 8:
            session = renewed(session, model, rule)
        held = [sgd(model[0]), sgd(model[2])] if step < 8 else [sgd(model)]
        backward(model, step)
        for optimizer in held:
            optimizer.step()
    numbers = {number for kept in statistics_of(session) for number in kept.kept[0].tolist()}
    session.remove()
    assert numbers == {len(FACTORS) - (8 if per == "rule" else 0)}


# --- updates by hand ------------------------------------------------------------------------------


@torch.no_grad()
def move_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.sub_(0.05 * param.grad)


@pytest.mark.cell(
    "updates written by hand",
    "step",
    differs="each backward pass counts as a step, unless `session.tick()` marks steps; `freeze` is refused",
)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("above", "per", "then"), RULES)
def test_updates_by_hand_go_by_ticks(above: str, per: str, then: str, parts: int) -> None:
    rule = spike_trap(above, per, then)
    model = make()
    wanted = make()
    hand = ByHand(**rule)
    with gradsurgeon.apply(model, rules(rule), optimizer=[]) as session:
        for step in range(len(FACTORS)):
            backward(model, step, parts)
            if session.tick():
                move_by_hand(model)
    for step in range(len(FACTORS)):
        backward(wanted, step)
        if hand.judge(grads(wanted)):
            move_by_hand(wanted)
            hand.learn()
    assert_same(model.parameters(), wanted.parameters())
    same_as(hand, session)
    assert hand.cut > 1


# -------------------------------------------------------------------------------------------------
# In every set-up of one process `spike-trap` does what the papers say, and learns from each update once.
# -------------------------------------------------------------------------------------------------


NAN = float("nan")


class Twice(torch.optim.SGD):
    """Evaluates its closure twice, and moves by what the second one says."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


@dataclass(frozen=True)
class Setup:
    parts: int = 1
    scaled: bool = False
    unscale: bool = False
    # Steps whose scaled gradients overflow, so that the scaler skips them.
    overflow: tuple[int, ...] = ()
    # Steps whose loss is NaN.
    nan: tuple[int, ...] = ()
    optimizer: str = "SGD"
    closure: bool = False
    # First and last of the steps in which the session is paused.
    pause: tuple[int, int] = (-1, -1)
    mode: Any = "act"
    compiled: str = ""


SETUPS = {
    "one process": Setup(),
    "one process, fused optimizer": Setup(optimizer="AdamW fused"),
    "accumulation": Setup(parts=4),
    "GradScaler": Setup(scaled=True, overflow=(2, 6, 7, 12)),
    "GradScaler, unscale_": Setup(scaled=True, unscale=True, overflow=(3,)),
    "GradScaler, fused optimizer": Setup(scaled=True, optimizer="SGD fused", overflow=(2, 6, 7)),
    "GradScaler and accumulation": Setup(scaled=True, parts=2, overflow=(1,)),
    "closure": Setup(closure=True),
    "closure evaluated twice": Setup(closure=True, optimizer="Twice"),
    "pause": Setup(pause=(4, 6)),
    "observe": Setup(mode="observe"),
    "NaN": Setup(nan=(2, 8)),
    "`torch.compile`, rules first": Setup(compiled="first"),
    "`torch.compile`, rules after the first call": Setup(compiled="after"),
}


def optimizer_of(model: nn.Module, setup: Setup) -> Any:
    name, *fused = setup.optimizer.split()
    if name == "Twice":
        return Twice(model.parameters(), lr=0.05)
    options: Json = {"momentum": 0.5} if name == "SGD" else {}
    kind = getattr(torch.optim, name)
    return kind(model.parameters(), lr=0.05, fused=bool(fused), **options)


def backward_in(model: Any, setup: Setup, step: int, scaler: torch.amp.GradScaler) -> float:
    model.zero_grad()
    for part in data(step, 8, 4).chunk(setup.parts):
        loss = model(part).square().mean() * FACTORS[step] / setup.parts
        loss = loss * NAN if step in setup.nan else loss
        (scaler.scale(loss) * (math.inf if step in setup.overflow else 1.0)).backward()
    return 0.0


def scaler_of(setup: Setup) -> torch.amp.GradScaler:
    """Return a scaler whose scale grows in every third step, or that does nothing."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=setup.scaled)


def train(setup: Setup, rule: Json) -> tuple[nn.Module, gradsurgeon.Session]:
    model: Any = make()
    called = model
    optimizer = optimizer_of(model, setup)
    scaler = scaler_of(setup)
    if setup.compiled == "after":
        called = torch.compile(model, backend="eager")
        called(data(0, 8, 4))
    with gradsurgeon.apply(model, rules(rule), mode=setup.mode) as session:
        if setup.compiled == "first":
            called = torch.compile(model, backend="eager")
        for step in range(len(FACTORS)):
            if step == setup.pause[0]:
                session.pause()
            if step == setup.pause[1] + 1:
                session.resume()
            if setup.closure:
                optimizer.step(lambda step=step: backward_in(called, setup, step, scaler))
                continue
            backward_in(called, setup, step, scaler)
            if setup.unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return model, session


def train_by_hand(setup: Setup, rule: Json) -> tuple[nn.Module, ByHand]:
    """Do the same in true units, without a scaler, closures and all else that a set-up brings."""
    # Where rules only observe, what `clip` would have let through is what is learnt.
    observing = setup.mode == "observe"
    model = make()
    hand = ByHand(**rule | ({"then": "clip"} if observing else {}))
    optimizer = optimizer_of(model, Setup(optimizer=setup.optimizer.removesuffix(" fused")))
    evaluations = 1
    if setup.optimizer == "Twice":
        evaluations = 2
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first, last = setup.pause
    plain = Setup(nan=setup.nan)
    for step in range(len(FACTORS)):
        going_on = step not in setup.overflow
        for _ in range(evaluations):
            if going_on:
                backward_in(model, plain, step, scaler_of(plain))
                seen = copy.deepcopy(grads(model)) if observing else grads(model)
                if not first <= step <= last:
                    going_on = hand.judge(seen)
        if going_on:
            optimizer.step()
            hand.learn()
    return model, hand


@pytest.mark.cell("one process", "step")
@pytest.mark.cell("one process, fused optimizer", "step")
@pytest.mark.cell("accumulation", "step")
@pytest.mark.cell("GradScaler", "step")
@pytest.mark.cell("GradScaler, fused optimizer", "step")
@pytest.mark.cell("GradScaler and accumulation", "step")
@pytest.mark.cell("`torch.compile`, rules first", "step")
@pytest.mark.cell("`torch.compile`, rules after the first call", "step")
@singly(name=SETUPS, above=ABOVE, per=PER, then=["clip", "skip-step"])
def test_the_bound_is_that_of_the_papers(name: str, above: str, per: str, then: str) -> None:
    setup = SETUPS[name]
    rule = spike_trap(above, per, then)
    wanted, hand = train_by_hand(setup, rule)
    model, session = train(setup, rule)
    assert_same(model.parameters(), wanted.parameters())
    same_as(hand, session)
    assert hand.cut > 1 or (name, then) == ("NaN", "clip")
    kinds = [event.kind for event in session.events]
    assert kinds.count("scaler-skip") == len(setup.overflow)
    if then == "skip-step" and setup.mode == "act":
        assert kinds.count("skipped-step") == kinds.count("spike") == hand.cut


def evaluate(model: nn.Module, factor: float, hand: ByHand | None) -> float:
    model.zero_grad()
    loss = model(data(0, 8, 4)).square().mean() * factor
    loss.backward()
    if hand is not None:
        hand.judge(grads(model))
    return float(loss.detach())


@pytest.mark.cell("closures (LBFGS)", "step")
@pytest.mark.parametrize("per", PER)
def test_lbfgs_moves_by_what_the_bound_lets_through(per: str) -> None:
    rule = spike_trap("sigmas", per, "clip")
    model = make()
    wanted = make()
    hand = ByHand(**rule)
    optimizers = [torch.optim.LBFGS(of.parameters(), lr=0.05, max_iter=3) for of in (model, wanted)]
    with gradsurgeon.apply(model, rules(rule)) as session:
        for factor in FACTORS:
            optimizers[0].step(partial(evaluate, model, factor, None))
            optimizers[1].step(partial(evaluate, wanted, factor, hand))
            hand.learn()
    # It divides by the curvature, which makes much of a last bit.
    assert_same(model.parameters(), wanted.parameters(), rtol=1e-3, atol=1e-4)
    same_as(hand, session, rel=1e-3)
    assert hand.cut > 2
    assert {kept[0] for kept in learnt(session).values()} == {len(FACTORS)}
