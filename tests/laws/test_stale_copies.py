"""Copies that `autocast` keeps around a whole loop are older than the updates; delayed gradients are older as a whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from small import linears, rule_file, sgd, take_step
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsurgeon

RULE = {"id": "loop", "action": "check-loop", "params": "*"}
STEPS = 8
Loop = Callable[[nn.Module, Optimizer], None]


def autocast(*, keeps: bool = True) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps)


def loss_of(model: nn.Module) -> Tensor:
    x = torch.randn(6, 4)
    return torch.as_tensor((model(x).float() - x.sum(1, keepdim=True)).square().mean())


def fit(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(STEPS):
        take_step(optimizer, loss_of(model))


def around_the_loop(model: nn.Module, optimizer: Optimizer) -> None:
    with autocast():
        fit(model, optimizer)


def copied_before_the_loop(model: nn.Module, optimizer: Optimizer) -> None:
    copies = {name: param.double() for name, param in model.named_parameters()}
    for _ in range(STEPS):
        x = torch.randn(6, 4, dtype=torch.float64)
        take_step(optimizer, torch.func.functional_call(model, copies, x).square().mean())


def around_each_step(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(STEPS):
        with autocast():
            take_step(optimizer, loss_of(model))


def without_copies(model: nn.Module, optimizer: Optimizer) -> None:
    with autocast(keeps=False):
        fit(model, optimizer)


def accumulated(model: nn.Module, optimizer: Optimizer) -> None:
    """The copies of a step serve all of its passes."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        with autocast():
            for _ in range(4):
                loss_of(model).backward()
        optimizer.step()


def delayed(model: nn.Module, optimizer: Optimizer) -> None:
    """Each gradient belongs to weights of four updates before, as in a pipeline."""
    outputs: deque[Tensor] = deque()
    for _ in range(STEPS + 4):
        with autocast():
            outputs.append(model(torch.randn(6, 4)))
        if len(outputs) > 4:
            take_step(optimizer, outputs.popleft().float().square().mean())


def views_of_weights(model: nn.Module, optimizer: Optimizer) -> None:
    """A view that was made before the loop has the weights of now."""
    weights = {name: param.view_as(param) for name, param in model.named_parameters()}
    for _ in range(STEPS):
        x = torch.randn(6, 4)
        take_step(optimizer, torch.func.functional_call(model, weights, x).square().mean())


def second_player(model: nn.Module, optimizer: Optimizer) -> None:
    """Two passes and two updates in one block: the second pass is an update behind."""
    for _ in range(STEPS):
        with autocast():
            take_step(optimizer, loss_of(model))
            take_step(optimizer, loss_of(model))


@pytest.mark.parametrize("loop", [around_the_loop, copied_before_the_loop])
def test_copies_older_than_the_updates_are_told_once(loop: Loop) -> None:
    event = events_of(loop)[0]
    assert (event.kind, event.rule, event.step, event.name) == ("check", "loop", 3, "0.weight")
    assert (
        "computes with a copy of 0.weight, 0.bias in another dtype that is older than the last 3"
        in (event.message)
    )
    assert len(events_of(loop)) == 1


@pytest.mark.parametrize(
    "loop",
    [around_each_step, without_copies, accumulated, delayed, views_of_weights, second_player],
)
def test_copies_that_are_as_new_as_they_can_be_are_silent(loop: Loop) -> None:
    assert events_of(loop) == []


def events_of(loop: Loop) -> list[gradsurgeon.Event]:
    torch.manual_seed(0)
    model = linears(4, 1)
    optimizer = sgd(model, 0.01)
    with gradsurgeon.apply(model, rule_file(RULE), optimizer=optimizer) as session:
        loop(model, optimizer)
        return session.events
