"""A report of `spike-trap` names an origin only where the order of the backward pass shows it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pairs import singly, slow
from ranks import Json
from small import attach, messages, rule_file, sgd, take_step
from torch import nn

import gradsurgeon
from gradsurgeon import GradientSpikeError
from gradsurgeon.actions.spike_trap import Above

GUARD = {"id": "guard", "action": "nan-trap", "params": "*"}


def spike_trap(**options: Any) -> Json:
    above = {"sigmas": 50.0, "warmup": 20}
    rule = {"id": "spikes", "action": "spike-trap", "params": "*", "above": above, "then": "raise"}
    return {**rule, **options}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)])


def grown(by: float) -> Callable[..., Any]:
    """Return a hook after which a module hands on so many times its gradient."""
    return lambda _module, into, _out: (into[0] * by,)


def report(
    model: nn.Module,
    backward: Callable[[bool], None],
    *rules: Json,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> list[str]:
    """Train until a trap raises in update 30, for whose pass ``backward`` is told so; return the lines of the report."""
    steppers = optimizers or [sgd(model, 0.001)]
    given = rule_file(*rules or [spike_trap()])
    with gradsurgeon.apply(model, given, optimizer=steppers) as session:
        for _ in range(30):
            model.zero_grad()
            backward(False)
            for stepper in steppers:
                stepper.step()
        model.zero_grad()
        backward(True)
        weights = [param.clone() for param in model.parameters()]
        with pytest.raises(GradientSpikeError) as caught:
            for stepper in steppers:
                stepper.step()
    if len(steppers) == 1:
        assert all(map(torch.equal, weights, model.parameters()))
    assert session.step == 31
    error = caught.value
    assert (error.rule, error.step, error.rank) == ("spikes", 30, 0)
    return str(error).splitlines()


def stopped(
    where: str,
    *,
    factor: float | None = None,
    guarded: bool = False,
    parts: int = 1,
    optimizers: tuple[str, ...] = ("01234",),
    **options: Any,
) -> list[str]:
    """Train layers, each with one of the optimizers, until a gradient is 10,000 times the usual; return the report.

    It grows in the backward pass of layer 2, a bit in that of each layer, or comes with the loss, which is multiplied by a factor.
    """
    model = layers()
    steppers = [
        torch.optim.SGD([p for place in owned for p in model[int(place)].parameters()], lr=1e-3)
        for owned in optimizers
    ]
    if factor is None:
        factor = 1e4 if where == "loss" else 1.0

    def backward(last: bool) -> None:
        if last and where == "layer 2":
            model[2].register_full_backward_hook(grown(1e4))
        if last and where == "each layer":
            for layer in [*model][1:]:
                layer.register_full_backward_hook(grown(10.0))
        for part in torch.randn(64, 8).chunk(parts):
            loss = (model(part) - part).square().mean()
            (loss * (factor if last else 1)).backward()

    rules = [*([GUARD] if guarded else []), spike_trap(**options)]
    return report(model, backward, *rules, optimizers=steppers)


def test_report_is_silent_about_the_age_of_a_statistic_of_100_updates() -> None:
    for above in (Above(sigmas=2.5), Above(times=1.05)):
        for updates, is_young in ((99, True), (100, False)):
            bound = above.bound()
            known = bound.bounds([float(updates), 1.0, 0.5][: bound.rows], 1.0)
            assert known is None or ("known from 99 updates" in known[1]) is is_young


@singly(per=["rule", "parameter"], parts=[1, 3], guarded=[False, True])
def test_with_or_without_a_nan_trap_it_goes_by_the_order_of_backward(
    guarded: bool, parts: int, per: str
) -> None:
    line = stopped("layer 2", guarded=guarded, parts=parts, per=per)[-1]
    assert line.startswith("in the order of backward the spike begins at 1.0.bias (")
    assert "; 2.0.weight (" in line
    line = stopped("loss", guarded=guarded, parts=parts, per=per)[-1]
    assert line.startswith("the first gradient of the backward pass is large already, 4.0.bias")
    assert "the spike came with the loss" in line


def test_the_order_is_not_that_of_the_model() -> None:
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "cab"})

    def backward(last: bool) -> None:
        x = model["a"](torch.randn(64, 8))
        if last:
            x = x + 1e4 * (x - x.detach())
        model["c"](model["b"](x)).square().mean().backward()

    line = report(model, backward)[-1]
    assert "in the order of backward the spike begins at a.weight" in line
    assert "; b.weight" in line


@pytest.mark.parametrize("guarded", [False, *slow(True)])
def test_of_two_optimizers_the_one_does_not_speak_of_what_came_before(guarded: bool) -> None:
    for where in ("layer 2", "loss"):
        text = "\n".join(stopped(where, guarded=guarded, optimizers=("01", "234")))
        assert "large already" not in text
        assert "came with the loss" not in text
    # The other one has the first gradient of the pass.
    assert "came with the loss" in stopped("loss", guarded=guarded, optimizers=("234", "01"))[-1]


def test_gradients_of_another_optimizer_may_come_in_between() -> None:
    line = stopped("layer 2", optimizers=("014", "23"))[-1]
    assert "the spike begins at 1.0.bias" in line
    assert "; 4.0.weight (" in line
    assert "and at the layers between the two" in line


def test_parameters_of_other_models_come_before_as_well() -> None:
    model = nn.Linear(8, 8, bias=False)
    other = nn.Linear(8, 1)

    def backward(last: bool) -> None:
        loss = other(model(torch.randn(64, 8))).square().mean()
        (loss * (1e4 if last else 1.0)).backward()

    assert "came with the loss" not in "".join(report(model, backward))


def test_passes_that_reach_different_parameters_have_no_common_order() -> None:
    model = layers()

    def backward(last: bool) -> None:
        x = torch.randn(64, 8)
        # A loss of its own in the middle of the model.
        (model[:3](x).square().mean() * (1e4 if last else 1.0)).backward()
        (model(x) - x).square().mean().backward()

    text = "".join(report(model, backward))
    assert "in the order of backward" not in text
    assert "came with the loss" not in text


@pytest.mark.parametrize("per", ["rule", "parameter"])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_layer_is_blamed_where_the_loss_is_a_little_larger_as_well(
    factor: float, per: str
) -> None:
    line = stopped("layer 2", factor=factor, per=per)[-1]
    assert line.startswith("in the order of backward the spike begins at 1.0.bias (")
    assert "the loss" not in line
    grown, before = map(float, re.findall(r"\(([\d.e+]+) times its running mean\)", line))
    assert 5e3 * factor < grown < 5e4 * factor
    assert 0.5 * factor < before < 2 * factor


def test_no_origin_is_named_where_the_loss_explains_a_part_of_the_growth() -> None:
    text = "".join(stopped("each layer", factor=2.0))
    assert "the spike came with the loss" not in text
    assert "look at this layer" not in text


def test_by_smallest_norms_no_origin_is_named() -> None:
    """What a bound by `times` starts from is the smallest norm of the warm-up, and no usual one."""
    model = layers()
    optimizer = sgd(model, 0.001)
    rule = spike_trap(per="parameter", above={"times": 1.5, "warmup": 10}, then="warn")
    with (
        warnings.catch_warnings(action="ignore"),
        attach(model, rule, optimizer=optimizer) as session,
    ):
        for step in range(31):
            x = torch.randn(64, 8)
            take_step(optimizer, (model(x) - x).square().mean() * (1e4 if step == 30 else 1.0))
        spikes = messages(session, "spike")
    assert spikes
    named = ("came with the loss", "the spike begins at")
    assert not [text for text in spikes if any(words in text for words in named)]
