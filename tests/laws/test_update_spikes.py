"""`spike-trap` on updates, against loops written by hand."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from models import data
from pack_trainings import launched
from ranks import Json
from running_bounds import clip_updates
from small import events_of, fired, messages, rule_file, tanh_net, weights_of
from spikes import rebuilt
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning, Session

# What the loss of each update is multiplied by.
FACTORS = (1.0, 1.2, 0.9, 1.1, 1.0, 30.0, 1.0, 0.8, 20.0, 1.1)
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.5, 0.5)),
    "fused": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, fused=True),
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return tanh_net(4, 6, 2)


def rule(**options: Any) -> Json:
    return {"id": "spikes", "action": "spike-trap", "params": "*", "tensor": "update", **options}


def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int, factor: float) -> None:
    optimizer.zero_grad()
    (net(data(number, 3, 4)).square().mean() * factor).backward()
    optimizer.step()


def train(
    above: Json,
    factors: Sequence[float] = FACTORS,
    *,
    net: nn.Module | None = None,
    make_optimizer: Optimizers = OPTIMIZERS["SGD"],
    mode: Literal["act", "observe"] = "act",
    **options: Any,
) -> tuple[Session, list[list[Tensor]]]:
    """Train under a rule; return the weights after each update."""
    model = net or make()
    optimizer = make_optimizer(model)
    weights = []
    rules = rule_file(rule(above=above, **options))
    with (
        warnings.catch_warnings(action="ignore", category=GradSurgeonWarning),
        gradsurgeon.apply(model, rules, optimizer=optimizer, mode=mode) as session,
    ):
        for number, factor in enumerate(factors):
            step(model, optimizer, number, factor)
            weights.append(weights_of(model))
    return session, weights


@pytest.mark.parametrize("per", ["rule", "parameter"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clip_leaves_the_update_of_a_loop_written_by_hand(name: str, per: str) -> None:
    bound = {"rule": 0.05, "parameter": 0.02}[per]
    make_optimizer = OPTIMIZERS[name]
    session, weights = train({"norm": bound}, make_optimizer=make_optimizer, per=per)
    net = make()
    optimizer = make_optimizer(net)
    cut = 0
    for number, factor in enumerate(FACTORS):
        before = weights_of(net)
        step(net, optimizer, number, factor)
        cut += clip_updates(list(net.parameters()), before, bound, per)
        for ours, theirs in zip(weights[number], net.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-7)
    assert 2 <= cut < 4 * len(FACTORS)
    status = session.status()["spikes"]
    assert status.fired == 4 * len(FACTORS)
    assert status.changed == pytest.approx(cut / status.fired)


def test_an_update_within_the_bound_is_bit_for_bit_that_without_a_rule() -> None:
    _, weights = train({"norm": 1e3})
    net = make()
    optimizer = OPTIMIZERS["SGD"](net)
    for number, factor in enumerate(FACTORS):
        step(net, optimizer, number, factor)
        assert all(map(torch.equal, weights[number], weights_of(net)))


def test_a_bound_learns_from_updates_and_a_resumed_one_is_an_unbroken_one() -> None:
    above = {"sigmas": 3, "warmup": 4, "beta": 0.9}
    session, weights = train(above, net=make())
    assert [event.step for event in events_of(session, "spike")] == [5, 6, 7, 8, 9]
    first = messages(session, "spike")[0]
    assert first.startswith("over 4 weight changes the norm 0.")
    assert (
        ", known from 5 updates so far; bound: 3 standard deviations above the mean): cut to "
        in first
    )
    # The norms of updates as they are left, by hand.
    norms = []
    before = weights_of(make())
    for after in weights:
        changes = [new - old for new, old in zip(after, before, strict=True)]
        norms.append(torch.cat([change.flatten() for change in changes]).double().norm().item())
        before = after
    mean = sum(norms[:4]) / 4
    for norm in norms[4:]:
        mean = 0.9 * mean + 0.1 * norm
    (statistic,) = session.state_dict()["rules"]["spikes"]["statistics"]
    assert statistic["kept"][:2, 0].tolist() == pytest.approx([len(FACTORS), mean], rel=1e-5)

    net = make()
    optimizer = OPTIMIZERS["SGD"](net)
    state: Json = {}
    for numbers in (range(3), range(3, 7), range(7, len(FACTORS))):
        with gradsurgeon.apply(net, rule_file(rule(above=above)), optimizer=optimizer) as part:
            if state:
                part.load_state_dict(state)
            for number in numbers:
                step(net, optimizer, number, FACTORS[number])
            state = rebuilt(part.state_dict())
    assert all(map(torch.equal, weights[-1], weights_of(net)))


@pytest.mark.parametrize("form", ["warn", "observe"])
def test_warn_and_observe_tell_of_the_update_and_leave_it(form: str) -> None:
    mode: Literal["act", "observe"] = "observe" if form == "observe" else "act"
    then = "warn" if form == "warn" else "clip"
    session, weights = train({"norm": 0.05}, then=then, mode=mode)
    _, plain = train({"norm": 1e3})
    for ours, theirs in zip(weights, plain, strict=True):
        assert all(map(torch.equal, ours, theirs))
    steps = [event.step for event in events_of(session, "spike")]
    assert 5 in steps
    outcome = "would be cut to 0.05"
    if form == "warn":
        outcome = "the update goes on (`then: warn`)"
        assert fired(session) == {"spikes": len(FACTORS)}
        assert session.status()["spikes"].altered == len(steps)
    assert messages(session, "spike")[0].endswith(f"(the fixed bound of the rule): {outcome}")


def test_a_launched_script_is_told_when_it_acts() -> None:
    def script() -> list[Tensor]:
        net = make()
        step(net, OPTIMIZERS["SGD"](net), 0, 1.0)
        return weights_of(net)

    seen = launched(script, [rule(above={"norm": 5})])
    assert any("  spikes  spike-trap  at updated  4 parameters" in line for line in seen.lines)


def test_a_warning_is_one_for_the_script() -> None:
    net = make()
    optimizer = OPTIMIZERS["SGD"](net)
    rules = rule_file(rule(above={"norm": 1e-6}, then="warn", per="parameter"))
    with (
        gradsurgeon.apply(net, rules, optimizer=optimizer),
        pytest.warns(GradSurgeonWarning, match=r"of 0.weight the norm 0.0261 is above 1e-06"),
    ):
        step(net, optimizer, 0, 1.0)


def test_skipped_updates_and_frozen_weights_teach_nothing() -> None:
    net = make()
    optimizer = OPTIMIZERS["SGD"](net)
    rules = rule_file(
        rule(above={"norm": 1.0}, per="parameter"),
        {"id": "still", "action": "freeze", "params": "0.bias"},
        {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"},
    )
    with gradsurgeon.apply(net, rules, optimizer=optimizer) as session:
        for number, factor in enumerate((1.0, float("nan"), 1.0)):
            step(net, optimizer, number, factor)
    (statistic,) = session.state_dict()["rules"]["spikes"]["statistics"]
    names = [name for name, _ in net.named_parameters()]
    assert statistic["params"] == names
    assert statistic["kept"][0].tolist() == [0.0 if name == "0.bias" else 2.0 for name in names]


def test_an_update_that_is_not_finite_is_told_and_left() -> None:
    net = make()
    by_hand = copy.deepcopy(net)
    session, weights = train({"norm": 0.05}, [float("nan")], net=net)
    step(by_hand, OPTIMIZERS["SGD"](by_hand), 0, float("nan"))
    for ours, theirs in zip(weights[0], weights_of(by_hand), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    (told,) = messages(session, "notice")
    assert told == "the norm is not finite: the weight changes were left alone"
    assert session.state_dict()["rules"]["spikes"]["statistics"][0]["kept"][0].tolist() == [0.0]


def test_the_plan_says_how_large_the_copies_are() -> None:
    text = str(gradsurgeon.plan(make(), rule_file(rule(above={"sigmas": 6}))))
    assert "spikes  spike-trap  updated  step post-hook  4 parameters        44  all" in text
    size = "keeps a copy of the matched weights during each update, 44 elements in all"
    assert f"spikes: {size}" in text
