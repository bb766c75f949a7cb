"""Rules on modules of random models, and the same edits as hooks that torch offers: equal outputs and gradients."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from fuzzing import examples
from ranks import Json
from small import attach
from torch import Tensor, nn

WIDTH = 4


class Around(nn.Module):
    """A module around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Residual(Around):
    def forward(self, x: Tensor) -> Tensor:
        return x + first(self.inner(x))


class InPlaceResidual(Around):
    """It writes into its input, and returns the same tensor object."""

    def forward(self, x: Tensor) -> Tensor:
        x += first(self.inner(x))
        return x


class Twice(Around):
    def forward(self, x: Tensor) -> Tensor:
        return first(self.inner(first(self.inner(x))))


class Doubled(Around):
    """It writes into what its inner module returned, and returns the same tensor object."""

    def forward(self, x: Tensor) -> Tensor:
        out = first(self.inner(x))
        out *= 2.0
        return out


class Pair(Around):
    """It returns one tensor in two places, and a third tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, Json]:
        out = first(self.inner(x))
        return out, {"same": out, "other": x * 2}


class Chain(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(first(x))
        return x


def first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


LEAVES: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH),
    nn.Tanh,
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.Identity,
    nn.Flatten,
)
BRANCHES: tuple[Callable[..., nn.Module], ...] = (
    Residual,
    InPlaceResidual,
    Twice,
    Doubled,
    Pair,
    Chain,
)


def drawn_model(draw: random.Random, depth: int = 3) -> nn.Module:
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(LEAVES)()
    kind = draw.choice(BRANCHES)
    layers = draw.randint(1, 3) if kind is Chain else 1
    return kind(*(drawn_model(draw, depth - 1) for _ in range(layers)))


class Root(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.body = Chain(*(drawn_model(draw) for _ in range(2)))
        self.end = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        # A product of its own keeps modules that write in place from what `begin` needs for its gradient.
        return self.end(first(self.body(self.begin(x) * 1.0)))  # type: ignore[no-any-return]


def drawn_rule(draw: random.Random, names: list[str]) -> Json:
    action: Json = draw.choice(
        (
            {"action": "clamp", "min": -0.3, "max": 0.2},
            {"action": "scale", "factor": draw.choice((0.5, -2.0))},
            {"action": "zero"},
        )
    )
    pattern = draw.choice((*names, "*", "body*", "*.inner", "*.layers.0", "*.layers.?"))
    return {**action, "modules": pattern, "optional": True}


EDITS: dict[str, Callable[[Tensor, Json], Tensor]] = {
    "clamp": lambda x, rule: x.clamp(rule["min"], rule["max"]),
    "scale": lambda x, rule: x * rule["factor"],
    "zero": lambda x, rule: torch.zeros_like(x),
}


def mapped(value: Any, edit: Callable[[Tensor], Tensor]) -> Any:
    """Return a structure with another tensor for each; one tensor in two places stays one."""
    known: dict[int, Tensor] = {}

    def each(part: Any) -> Any:
        if isinstance(part, Tensor):
            if id(part) not in known:
                known[id(part)] = edit(part)
            return known[id(part)]
        if isinstance(part, dict):
            return {key: each(item) for key, item in part.items()}
        return tuple(each(item) for item in part)

    return each(value)


def edited(value: Any, rule: Json) -> Any:
    return mapped(value, lambda tensor: EDITS[rule["action"]](tensor, rule))


def matched(name: str, rule: Json) -> bool:
    return bool(name) and fnmatch.fnmatchcase(name, rule["modules"])


def hook_values(model: nn.Module, rules: list[Json]) -> None:
    for name, module in model.named_modules():
        for rule in rules:
            if not matched(name, rule):
                continue
            if rule["tensor"] == "input":
                module.register_forward_pre_hook(lambda *call, rule=rule: edited(call[1], rule))
            else:
                module.register_forward_hook(lambda *call, rule=rule: edited(call[2], rule))


class Result(NamedTuple):
    output: Tensor
    grads: list[Tensor | None]


def ran(model: nn.Module, x: Tensor) -> Result | None:
    """Return what a model makes of an input, or nothing if the model writes over what its own gradient needs."""
    try:
        output = model(x)
        if output.requires_grad:  # `zero` can cut the output off from all parameters
            output.square().sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017 # others are faults
        return None
    return Result(output.detach(), [param.grad for param in model.parameters()])


def equal(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)


def made(seed: int) -> tuple[Root, random.Random]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    return Root(draw), draw


class HandWrittenHooks:
    """Tensor hooks on what modules return, one per rule for each gradient that autograd knows."""

    def __init__(self, model: nn.Module, rules: list[Json]) -> None:
        self._hooked: set[tuple[int, int, str]] = set()
        # They live on, so that no other tensor gets the id of one.
        self._kept: list[Tensor] = []
        for name, module in model.named_modules():
            matching = [rule for rule in rules if matched(name, rule)]
            if matching:
                module.register_forward_hook(partial(self._hook, matching))

    def _hook(self, rules: list[Json], _module: nn.Module, args: Any, output: Any) -> Any:
        taken = {id(arg) for arg in args}

        def hooked(part: Tensor) -> Tensor:
            # The gradient of a module's output is without what others send back to the same tensor.
            out = part.view_as(part) if id(part) in taken else part
            self._add(out, rules)
            return out

        return mapped(output, hooked)

    def _add(self, tensor: Tensor, rules: list[Json]) -> None:
        if not tensor.requires_grad:
            return
        for rule in rules:
            # A write in place gives the tensor object another value, with a gradient of its own.
            mark = id(tensor), tensor._version, rule["id"]
            if mark in self._hooked:
                continue
            self._hooked.add(mark)
            self._kept.append(tensor)
            tensor.register_hook(lambda grad, rule=rule: EDITS[rule["action"]](grad, rule))


@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("tensors", [("output", "output", "input"), ("output.grad",)], ids=str)
def test_edits_act_once_on_what_each_module_takes_and_returns(
    part: int, tensors: tuple[str, ...]
) -> None:
    for seed in range(part * 1000, part * 1000 + examples(200, long=True)):
        by_hand, draw = made(seed)
        by_rule, _ = made(seed)
        names = [name for name, _ in by_hand.named_modules() if name]
        rules = [
            {"id": f"r{number}", **drawn_rule(draw, names), "tensor": draw.choice(tensors)}
            for number in range(draw.randint(1, 3))
        ]
        x = torch.randn(3, WIDTH)
        if tensors == ("output.grad",):
            HandWrittenHooks(by_hand, rules)
        else:
            hook_values(by_hand, rules)
        wanted = ran(by_hand, x)
        with attach(by_rule, *rules):
            found = ran(by_rule, x)
        if wanted is None or found is None:
            assert found is wanted, (seed, rules)
            continue
        assert torch.equal(found.output, wanted.output), (seed, rules)
        assert all(map(equal, found.grads, wanted.grads)), (seed, rules)
