"""The loop that a trainer runs, written out, with the rules written out as well.

A trainer with gradsurgeon has to end with the very weights of this loop. A rule that acted twice, or
before the clipping, or on another gradient than the one that the optimizer consumes, would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import Json
from small import kinds_of, rule_file
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import NonFiniteGradientError
from gradsurgeon.runtime.session import Session

# What every trainer here is told: clip to this norm, take so many micro-batches per step.
CLIP = 0.5
PARTS = 2
STEPS = 4
Grads = Mapping[str, Tensor]
Micro = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Hand:
    """One rule, and the same thing by hand."""

    rule: Json
    # On the contribution of one backward pass, by a hook of torch.
    contribution: Callable[[Tensor], Tensor] | None = None
    # On the gradient of the output of the module that holds the parameters.
    output: Callable[[Tensor], Tensor] | None = None
    # On the final gradients, in place, right before the optimizer is called.
    final: Callable[[Grads], None] | None = None
    frozen: Callable[[int], bool] = lambda _: False

    def rules(self) -> Json:
        """Return a rule file with the rule and a log that must not be moved by it."""
        rule = {"id": "it", **self.rule}
        return rule_file(rule, {"id": "norms", "action": "norm-log", "params": "*"})


def _bounded(grads: Grads) -> None:
    for grad in grads.values():
        grad.clamp_(-0.004, 0.006)


def _clipped(grads: Grads) -> None:
    torch.nn.utils.clip_grads_with_norm_(
        _with_grads(grads), 0.05, torch.nn.utils.get_total_norm(list(grads.values()))
    )


def _with_grads(grads: Grads) -> list[Tensor]:
    found = []
    for grad in grads.values():
        holder = torch.zeros_like(grad)
        holder.grad = grad
        found.append(holder)
    return found


def _halved(grads: Grads) -> None:
    for grad in grads.values():
        grad.mul_(0.5)


def table(part: str, module: str = "") -> dict[str, Hand]:
    """Return the rules; ``part`` is a pattern for some parameters of the model, of ``module``."""
    window = {"from": 1, "to": 3}
    clamp = {"action": "clamp", "min": -0.004, "max": 0.006, "at": "step", "params": part}
    clip = {"action": "clip-norm", "max_norm": 0.05, "per": "rule", "params": part}
    half = {"action": "scale", "factor": 0.5, "params": part}
    return {
        "no rule": Hand({"action": "norm-log", "params": part}),
        "clamp, step": Hand(clamp, final=_bounded),
        "clip-norm per rule, step": Hand(clip, final=_clipped),
        "scale, step": Hand({**half, "at": "step"}, final=_halved),
        "scale, backward": Hand({**half, "at": "backward"}, contribution=lambda g: g * 0.5),
        "scale, modules": Hand(
            {
                "action": "scale",
                "factor": 0.5,
                "modules": module or part.removesuffix(".*"),
                "tensor": "output.grad",
            },
            output=lambda g: g * 0.5,
        ),
        "freeze, step": Hand(
            {"action": "freeze", "params": part, "steps": window}, frozen=lambda step: 1 <= step < 3
        ),
    }


RULES = list(table("*"))


@dataclass(frozen=True)
class End:
    """How a run ended."""

    weights: dict[str, Tensor]
    norms: list[float]

    def check(self, model: nn.Module, history: list[tuple[int, float]]) -> None:
        """Check that a trainer with the rule has come to the same, and logged the same norms.

        They are taken before the trainer clips, and go by the steps of the optimizer.
        """
        assert distance(weights(model), self.weights) < 1e-6
        assert [step for step, _ in history] == list(range(len(self.norms)))
        assert [norm for _, norm in history] == pytest.approx(self.norms, rel=1e-5)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Sequence[Micro]],
    hand: Hand,
    *,
    logged: str = "",
    skipped: int = -1,
) -> End:
    """Train with accumulation and clipping.

    Args:
        model: trained in place.
        optimizer: of its parameters.
        steps: the losses of the micro-batches of each step.
        hand: what to do to the gradients.
        logged: the parameter whose norm after the last backward pass of each step is returned.
        skipped: the number of a step at which nothing is to be updated.
    """
    params = dict(model.named_parameters())
    prefix = hand.rule.get("params", hand.rule.get("modules", "") + ".*").removesuffix("*")
    mine = {name: param for name, param in params.items() if name.startswith(prefix)}
    assert mine
    assert len(mine) < len(params)
    _hook(hand, mine.values(), model.get_submodule(prefix.removesuffix(".")))
    norms = []
    for number, micros in enumerate(steps):
        for micro in micros:
            micro(model).backward()
        if logged:
            norms.append(_grad(params[logged]).norm().item())
        torch.nn.utils.clip_grad_norm_(params.values(), CLIP)
        if hand.final is not None:
            hand.final({name: _grad(param) for name, param in mine.items()})
        if hand.frozen(number):
            for param in mine.values():
                param.grad = None
        if number != skipped:
            optimizer.step()
        optimizer.zero_grad()
    return End({name: param.detach().clone() for name, param in params.items()}, norms)


def _hook(hand: Hand, params: Iterable[Tensor], module: nn.Module) -> None:
    for param in params if hand.contribution is not None else ():
        param.register_hook(hand.contribution)
    if hand.output is not None:
        module.register_forward_hook(_on_grad(hand.output))


def _on_grad(edit: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else [output]:
            tensor.register_hook(edit)

    return hook


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two sets of weights."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


def trap(then: str) -> Json:
    """Return a rule file with a trap on everything."""
    rule = {"id": "trap", "action": "nan-trap", "params": "*", "then": then}
    return rule_file(rule)


class Poison(torch.autograd.Function):
    """Hands its input through, and puts a NaN into the gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        grad.view(-1)[0] = float("nan")
        return grad


class Fault:
    """Poisons the gradient of a module's output in one of its calls; sees what backward delivers.

    What it sees is independent of the rules: the order in which gradients became non-finite.
    """

    def __init__(self, model: nn.Module, module: str, call: int) -> None:
        self.first = ""
        self.reached: list[str] = []
        self._call = call
        self._calls = 0
        model.get_submodule(module).register_forward_hook(self._poison)
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda p, name=name: self._see(name, p))

    def _poison(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
        self._calls += 1
        if self._calls - 1 != self._call:
            return None
        self.reached.clear()
        poisoned: Tensor = Poison.apply(output)
        return poisoned

    def _see(self, name: str, param: Tensor) -> None:
        if not self.first:
            self.reached.append(name)
            if not _grad(param).isfinite().all():
                self.first = name

    def check(self, session: Session, error: NonFiniteGradientError | None, micro: int) -> None:
        """Check that the session has seen the same, in the third step, whatever came after it."""
        trapped = session.events[0]
        assert (trapped.kind, trapped.step, trapped.name) == ("trap", 2, self.first)
        total = session.status()[trapped.rule].matched
        finite = len(self.reached) - 1
        # Clipping makes all of them NaN, those behind the fault as well.
        assert 0 < finite < total - 1
        assert (
            f"{total - finite} of {total} gradients are not finite after backward, "
            f"micro-batch {micro + 1} of {PARTS}"
        ) in trapped.message
        kinds = kinds_of(session)
        if error is None:
            assert kinds == ["trap", "skipped-step"]
        else:
            assert kinds == ["trap"]
            assert (error.step, error.name) == (2, self.first)


@dataclass(frozen=True)
class Compared:
    """A trainer that trains a model in place, and the same loop written by hand.

    Attributes:
        table: the rules.
        logged: a parameter whose norms are compared.
        module: the module whose output gets a faulty gradient.
        written: runs the loop by hand under a rule.
    """

    table: Mapping[str, Hand]
    logged: str
    module: str
    written: Callable[..., End]

    def check_rule(self, name: str, model: nn.Module, fit: Callable[[], None]) -> None:
        """Check that the trainer ends with the weights of the loop, and that the rule does something."""
        wanted = self.written(self.table[name], logged=self.logged)
        with gradsurgeon.apply(model, self.table[name].rules()) as session:
            fit()
            assert session.step == STEPS
        assert session.events == []
        wanted.check(model, session.history(self.logged, rule="norms"))
        if name != "no rule":
            without = self.written(self.table["no rule"])
            assert distance(without.weights, wanted.weights) > 1e-4

    def check_nan(self, then: str, micro: int, model: nn.Module, fit: Callable[[], None]) -> str:
        """Check that a trap stops a NaN of the third step; return the parameter that had it first."""
        fault = Fault(model, self.module, call=2 * PARTS + micro)
        error = None
        with gradsurgeon.apply(model, trap(then)) as session:
            if then == "raise":
                with pytest.raises(NonFiniteGradientError) as caught:
                    fit()
                error = caught.value
            else:
                fit()
        fault.check(session, error, micro)
        if then == "skip-step":
            wanted = self.written(self.table["no rule"], skipped=2)
            assert distance(weights(model), wanted.weights) < 1e-6
        else:
            assert all(weight.isfinite().all() for weight in model.parameters())
        return fault.first
