"""In every set-up of one process `spike-trap` does what the papers say, and learns from each update once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from models import CASES, Case, data
from pairs import pairwise
from running_bounds import ByHand
from spikes import ABOVE, FACTORS, PER, assert_same, grads, learnt, make, rules, same_as, spike_trap
from torch import nn

import gradsurgeon

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
    options: dict[str, Any] = {"momentum": 0.5} if name == "SGD" else {}
    kind = getattr(torch.optim, name)
    return kind(model.parameters(), lr=0.05, fused=bool(fused), **options)


def backward_in(model: Any, setup: Setup, step: int, scaler: Any = None) -> float:
    model.zero_grad()
    for part in data(step, 8, 4).chunk(setup.parts):
        loss = model(part).square().mean() * FACTORS[step] / setup.parts
        loss = loss * NAN if step in setup.nan else loss
        if scaler is not None:
            loss = scaler.scale(loss) * (math.inf if step in setup.overflow else 1.0)
        loss.backward()
    return 0.0


def train(setup: Setup, rule: dict[str, Any]) -> tuple[nn.Module, gradsurgeon.Session]:
    model: Any = make()
    called = model
    optimizer = optimizer_of(model, setup)
    if setup.compiled == "after":
        called = torch.compile(model, backend="eager")
        called(data(0, 8, 4))
    # Its scale grows in every third step.
    scaler = None
    if setup.scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    with gradsurgeon.apply(model, rules(rule), mode=setup.mode) as session:
        if setup.compiled == "first":
            called = torch.compile(model, backend="eager")
        for step in range(len(FACTORS)):
            if step == setup.pause[0]:
                session.pause()
            if step == setup.pause[1] + 1:
                session.resume()
            if setup.closure:
                optimizer.step(lambda step=step: backward_in(called, setup, step))
                continue
            backward_in(called, setup, step, scaler)
            if scaler is None:
                optimizer.step()
                continue
            if setup.unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return model, session


def train_by_hand(setup: Setup, rule: dict[str, Any]) -> tuple[nn.Module, ByHand]:
    """Do the same in true units, without a scaler, closures and all else that a set-up brings."""
    # Where rules only observe, what `clip` would have let through is what is learnt.
    model, hand = make(), ByHand(**rule | ({"then": "clip"} if setup.mode == "observe" else {}))
    plain = Setup(optimizer="AdamW" if "AdamW" in setup.optimizer else "SGD")
    optimizer = optimizer_of(model, plain)
    if setup.optimizer == "Twice":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first, last = setup.pause
    for step in range(len(FACTORS)):
        if step in setup.overflow:
            continue
        going_on = True
        for _ in range(2 if setup.optimizer == "Twice" else 1):
            if going_on:
                backward_in(model, Setup(nan=setup.nan), step)
                seen = grads(model)
                if setup.mode == "observe":
                    seen = {name: None if g is None else g.clone() for name, g in seen.items()}
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
@pairwise(name=SETUPS, above=ABOVE, per=PER, then=["clip", "skip-step"])
def test_the_bound_is_that_of_the_papers(name: str, above: str, per: str, then: str) -> None:
    setup, rule = SETUPS[name], spike_trap(above, per, then)
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
    model, wanted, hand = make(), make(), ByHand(**rule)
    with gradsurgeon.apply(model, rules(rule)) as session:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3)
        for factor in FACTORS:
            optimizer.step(partial(evaluate, model, factor, None))
    optimizer = torch.optim.LBFGS(wanted.parameters(), lr=0.05, max_iter=3)
    for factor in FACTORS:
        optimizer.step(partial(evaluate, wanted, factor, hand))
        hand.learn()
    # It divides by the curvature, which makes much of a last bit.
    assert_same(model.parameters(), wanted.parameters(), rtol=1e-3, atol=1e-4)
    same_as(hand, session, rel=1e-3)
    assert hand.cut > 2
    assert {kept[0] for kept in learnt(session).values()} == {len(FACTORS)}


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_kind_are_measured_and_cut(name: str, per: str) -> None:
    case, rule = CASES[name], spike_trap("times", per, "clip")
    model, wanted, hand = case.make(), case.make(), ByHand(**rule)
    with gradsurgeon.apply(model, rules(rule)) as session:
        steps(case, model, None)
    steps(case, wanted, hand)
    assert_same(model.parameters(), wanted.parameters())
    same_as(hand, session)
    assert hand.cut > 2


def steps(case: Case, model: nn.Module, hand: ByHand | None) -> None:
    torch.manual_seed(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step, factor in enumerate(FACTORS):
        if step == 3:
            model.requires_grad_(True)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        (case.loss(model, step) * factor).backward()
        if hand is not None:
            hand.judge(grads(model))
        optimizer.step()
        if hand is not None:
            hand.learn()
