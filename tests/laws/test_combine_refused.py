"""What `gradsurgeon.backward` cannot do is refused by name, before a weight moves; nothing of it is silent."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from several_losses import (
    Checkpointed,
    Heads,
    applied,
    flat_grads,
    heads,
    trunk_of,
    two,
)
from small import messages, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon import GradSurgeonError, GradSurgeonWarning

pytestmark = pytest.mark.slow

COMBINE = {"action": "combine", "method": "mgda"}


class WritesItsSaved(torch.autograd.Function):
    """Works once: its backward pass leaves something else in what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.factor = [1.0]
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.factor[0] *= 10.0
        return grad * ctx.factor[0]


class Unrepeatable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Any:
        return WritesItsSaved.apply(self.up(x))


class Reentrant(Heads):
    def forward(self, x: Tensor) -> Any:
        features = self.trunk(x)
        return checkpoint(self.seg, features, use_reentrant=True), self.depth(features)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a graph that works once": (
        lambda: Heads(Unrepeatable()),
        "rule it: .*trunk.up.weight do not add up .* twice",
    ),
    "a checkpoint": (lambda: Heads(Checkpointed(reentrant=True)), "use_reentrant=False"),
    "a checkpoint around a head": (Reentrant, "use_reentrant=False"),
}


@pytest.mark.parametrize("rule", [COMBINE, {"action": "conflict"}], ids=["combine", "conflict"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_gone_through_twice(case: str, rule: dict[str, str]) -> None:
    make, text = REFUSED[case]
    model = make()
    applied(model, {**rule, "id": "it"})
    with pytest.raises((GradSurgeonError, RuntimeError), match=text):
        gradsurgeon.backward(two(model, torch.randn(5, 6)))


def test_a_first_gradient_that_is_not_finite_does_not_vouch_for_the_graph() -> None:
    model, x = Heads(Unrepeatable()), torch.randn(5, 6)
    applied(model, COMBINE)
    losses = two(model, x)
    gradsurgeon.backward({**losses, "seg": losses["seg"] * torch.nan})
    model.zero_grad()
    with pytest.raises(GradSurgeonError, match="do not add up"):
        gradsurgeon.backward(two(model, x))


def test_weights_that_cannot_be_had_leave_the_sum_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = heads()
    expected = copy.deepcopy(model)
    sum(two(expected, x).values()).backward()  # type: ignore[union-attr]
    applied(model, {"action": "combine", "method": "upgrad"})

    def fail(*_: object) -> None:
        raise ValueError("Failed to solve the quadratic programming problem.")

    import torchjd.linalg

    monkeypatch.setattr(torchjd.linalg.QuadprogProjector, "_project_weight_vector", fail)
    with pytest.warns(GradSurgeonWarning, match=r"Failed to solve .* plain sum"):
        gradsurgeon.backward(two(model, x))
    torch.testing.assert_close(flat_grads(trunk_of(model)), flat_grads(trunk_of(expected)))


def test_an_exception_in_a_hook_leaves_the_hooks_as_they_were() -> None:
    model, x = heads()
    weight = model.trunk[0].weight
    weight.register_hook(lambda grad: grad)
    hooks = dict(weight._backward_hooks)  # nobody else tells
    applied(model, COMBINE)
    features = model.trunk(x)

    def fail(_grad: Tensor) -> None:
        raise ZeroDivisionError("in a hook")

    features.register_hook(fail)
    losses = {"seg": model.seg(features).mean(), "depth": model.depth(features).square().mean()}
    with pytest.raises(ZeroDivisionError):
        gradsurgeon.backward(losses)
    assert dict(weight._backward_hooks) == hooks  # as above
    model.zero_grad()
    gradsurgeon.backward(two(model, x))
    assert weight.grad is not None


def test_a_rule_whose_losses_never_came_says_so() -> None:
    model = Heads()
    optimizer = sgd(model, 0.02)
    with (
        warnings.catch_warnings(action="ignore", category=GradSurgeonWarning),
        applied(model, {"action": "conflict", "id": "tasks"}) as session,
    ):
        for _ in range(12):
            sum(two(model, torch.randn(16, 6)).values()).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    said = messages(session, "never-fired")
    assert said[0].endswith(
        "never fired: no gradsurgeon.backward gave the losses the rule names (seg, depth), or they reach no "
        "parameter it matched"
    )
