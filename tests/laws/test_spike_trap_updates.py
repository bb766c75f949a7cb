"""Of which update a gradient is judged as a part of, and in which statistic of `spike-trap` it enters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from models import CASES, Case, data
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
)
from torch import Tensor, nn

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


@pytest.mark.filterwarnings("ignore:rule spikes. gradients come to")
@singly(kind=KINDS, above=ABOVE, per=PER, then=["clip", "skip-step"])
def test_each_optimizer_has_a_bound_and_goes_on_with_it(
    kind: str, above: str, per: str, then: str
) -> None:
    rule = spike_trap(above, per, then)
    model, wanted = make(), make()
    with gradsurgeon.apply(model, rules(rule)):
        for step, held in enumerate(optimizers(kind, model)):
            backward(model, step)
            for optimizer in held:
                optimizer.step()
    hands: list[ByHand] = []
    retired: list[ByHand] = []
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
                retired.append(hands[number])
                hands[number] = ByHand(**rule)
            hand = hands[number]
            owned = [p for group in optimizer.param_groups for p in group["params"]]
            if hand.judge({names[id(param)]: param.grad for param in owned}):
                optimizer.step()
                hand.learn()
    assert_same(model.parameters(), wanted.parameters())
    assert sum(hand.cut for hand in (*hands, *retired)) > 1


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
            state = session.state_dict()
            session.remove()
            session = gradsurgeon.apply(model, rules(rule))
            session.load_state_dict(state)
        held = [sgd(model[0]), sgd(model[2])] if step < 8 else [sgd(model)]
        backward(model, step)
        for optimizer in held:
            optimizer.step()
    numbers = {
        number
        for part in session.state_dict()["rules"]["spikes"]["statistics"]
        for number in part["kept"][0].tolist()
    }
    session.remove()
    assert numbers == {len(FACTORS) - (8 if per == "rule" else 0)}


@singly(per=PER, resumed=[False, True], part=[0, 2])
def test_optimizers_that_share_parameters_go_on_each_with_its_own(
    per: str, resumed: bool, part: int
) -> None:
    """Of the whole and of a part, taken on by turns; the part has smaller norms."""
    rule = spike_trap("times", per, "clip")
    model: Any = make()
    held = [sgd(model), sgd(model[part])]
    session = gradsurgeon.apply(model, rules(rule), optimizer=held)
    for step in range(len(FACTORS)):
        if resumed and step == 8:
            state = session.state_dict()
            session.remove()
            session = gradsurgeon.apply(model, rules(rule), optimizer=held)
            session.load_state_dict(state)
        for optimizer in held:
            backward(model, step)
            optimizer.step()
    session.remove()
    wanted: Any = make()
    hands = [ByHand(**rule)]
    owned = [dict(wanted.named_parameters())]
    owned.append({name: param for name, param in owned[0].items() if name[0] == str(part)})
    for step in range(len(FACTORS)):
        for number, params in enumerate(owned):
            backward(wanted, step)
            if number == len(hands):
                hands.append(ByHand(**rule).taught_by(hands))
            hands[number].judge({name: param.grad for name, param in params.items()})
            sgd(wanted if number == 0 else wanted[part]).step()
            hands[number].learn()
    assert_same(model.parameters(), wanted.parameters())
    assert all(hand.cut > 1 for hand in hands)


@pytest.mark.cell("an optimizer per parameter, stepped inside backward", "step")
@pytest.mark.parametrize("above", ABOVE)
@pytest.mark.parametrize("order", ["apply first", "apply last"])
def test_optimizers_inside_backward_clip_each_gradient_by_its_own_past(
    order: str, above: str
) -> None:
    rule = spike_trap(above, "parameter", "clip")
    wanted, hand = make(), ByHand(**rule)
    outer = sgd(wanted)
    for step in range(len(FACTORS)):
        backward(wanted, step)
        hand.judge(grads(wanted))
        outer.step()
        hand.learn()
    model = make()
    inner: dict[Tensor, torch.optim.Optimizer] = {}

    def move(param: Tensor) -> None:
        inner[param].step()
        inner[param].zero_grad()

    session = gradsurgeon.apply(model, rules(rule)) if order == "apply first" else None
    for param in model.parameters():
        inner[param] = torch.optim.SGD([param], lr=0.05)
        param.register_post_accumulate_grad_hook(move)
    with session or gradsurgeon.apply(model, rules(rule)) as session:
        for step in range(len(FACTORS)):
            backward(model, step)
    assert_same(model.parameters(), wanted.parameters())
    same_as(hand, session)
    assert hand.cut > 2


# --- updates by hand ------------------------------------------------------------------------------


@torch.no_grad()
def move_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.sub_(0.05 * param.grad)


@pytest.mark.parametrize("then", ["clip", "warn"])
def test_without_ticks_a_second_pass_would_enter_twice(then: str) -> None:
    """Without ticks the end of each backward pass may be that of the step."""
    model = make()
    with (
        gradsurgeon.apply(model, rules(spike_trap("sigmas", "rule", then))),
        pytest.raises(gradsurgeon.GradSurgeonError, match="the effect would compound"),
    ):
        backward(model, 0, 4)


@pytest.mark.cell(
    "updates written by hand",
    "step",
    differs="each backward pass counts as a step, unless `session.tick()` marks steps; `freeze` is refused",
)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("above", "per", "then"), RULES)
def test_updates_by_hand_go_by_ticks(above: str, per: str, then: str, parts: int) -> None:
    rule = spike_trap(above, per, then)
    model, wanted, hand = make(), make(), ByHand(**rule)
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


def backward_in(model: Any, setup: Setup, step: int, scaler: Any = None) -> float:
    model.zero_grad()
    for part in data(step, 8, 4).chunk(setup.parts):
        loss = model(part).square().mean() * FACTORS[step] / setup.parts
        loss = loss * NAN if step in setup.nan else loss
        if scaler is not None:
            loss = scaler.scale(loss) * (math.inf if step in setup.overflow else 1.0)
        loss.backward()
    return 0.0


def train(setup: Setup, rule: Json) -> tuple[nn.Module, gradsurgeon.Session]:
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


def train_by_hand(setup: Setup, rule: Json) -> tuple[nn.Module, ByHand]:
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
@singly(name=SETUPS, above=ABOVE, per=PER, then=["clip", "skip-step"])
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


@singly(per=PER, name=CASES)
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
