"""Trainings under the launcher in the process of the test, with rules that nobody chose for them.

Each training is a function that returns its parameters. Some meet what a rule refuses, others run through much of the
package.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import data
from ranks import Json
from small import sgd, take_step
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 # the name everybody uses
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon.integrations.launcher.models import Models
from gradsurgeon.integrations.launcher.script_end import ScriptEnd
from gradsurgeon.integrations.launcher.settings import Settings
from gradsurgeon.integrations.launcher.training_detector import TrainingDetector
from gradsurgeon.runtime import registry
from gradsurgeon.tensors import _torch

DEBUG = "gradsurgeon:debug@1"
Train = Callable[[], Sequence[Tensor]]
# The collector runs at each search for models, and there is nothing to collect.
_RULES: dict[str, gradsurgeon.RuleSet] = {}


@dataclass
class Launched:
    """The weights that a training ended with, what the launcher wrote, and the status of the rules of each model."""

    weights: list[Tensor]
    lines: list[str]
    statuses: list[dict[str, gradsurgeon.RuleStatus]]

    def fired(self) -> set[str]:
        return {rule for status in self.statuses for rule, one in status.items() if one.fired}


def launched(
    train: Train,
    rules: str | list[Json] = DEBUG,
    *,
    record: str = "",
    watch: Callable[[], AbstractContextManager[None]] = nullcontext,
    ends_by: tuple[type[Exception], ...] = (),
) -> Launched:
    """Run a training as `gradsurgeon run` does with a pack.

    Args:
        train: the training.
        rules: the name of a pack, or rules that are treated as those of a pack.
        record: a run directory.
        watch: surrounds the training and the end of the script.
        ends_by: errors of the training that end the script.
    """
    pack = rules if isinstance(rules, str) else DEBUG
    given = rules if isinstance(rules, str) else {"version": 1, "rules": rules}
    if pack not in _RULES:
        _RULES[pack] = gradsurgeon.load(pack)
    chosen = _RULES[pack] if isinstance(rules, str) else gradsurgeon.load(given)
    models = Models(Settings(pack, record=record), chosen)
    end = ScriptEnd(models)
    end._pid = os.getpid()
    detector = TrainingDetector(models, first_step=end.first_step)
    with contextlib.redirect_stderr(io.StringIO()) as err:
        detector.install()
        try:
            with watch():
                weights = []
                try:
                    weights += [param.detach().clone() for param in train()]
                except ends_by as error:
                    sys.last_value = error
                end._finish()
        finally:
            detector.uninstall()
            vars(sys).pop("last_value", None)
            # A session that could not be removed must not meet the next training.
            for session in list(registry._attached):
                session.removed = False
                session.remove_with_records()
    statuses = [model.attachment.status() for model in models.attached]
    return Launched(weights, err.getvalue().splitlines(), statuses)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Tell whether weights are equal bit by bit, NaN included."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def loss_of(model: Any, step: int) -> Any:
    return model(data(step, 5, 4)).square().mean()


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, bad: float = 1.0) -> None:
    """Take plain steps; the loss of the third one is multiplied by a number."""
    for step in range(steps):
        take_step(optimizer, loss_of(model, step) * (bad if step == 2 else 1.0))


def plain() -> Sequence[Tensor]:
    model = net()
    fit(model, torch.optim.Adam(model.parameters(), lr=0.01), steps=4)
    return list(model.parameters())


def with_a_nan() -> Sequence[Tensor]:
    model = net()
    fit(model, sgd(model, 0.01), steps=4, bad=math.nan)
    return list(model.parameters())


def scaled() -> Sequence[Tensor]:
    """A loss scale, with an overflow in the third step, and a clip in the last one."""
    model = net()
    optimizer = sgd(model, 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * (math.inf if step == 2 else 1.0)).backward()
        if step == 3:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return list(model.parameters())


def lbfgs(factor: float = 1.0) -> Sequence[Tensor]:
    model = net()
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(3):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, step) * (factor if step == 2 else 1.0)
            loss.backward()
            return loss

        optimizer.step(closure)
    return list(model.parameters())


def lbfgs_with_a_nan() -> Sequence[Tensor]:
    return lbfgs(math.nan)


def by_hand(factor: float = 1.0, *, clears: bool = True) -> Sequence[Tensor]:
    """Updates without an optimizer: that of a part, which is gone, has shown the part to the launcher."""
    torch.manual_seed(0)
    first = nn.Linear(4, 6)
    sgd(first)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(6, 2))
    for step in range(4):
        (loss_of(model, step) * (factor if step == 2 else 1.0)).backward()
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param.sub_(0.1 * param.grad)
                if clears:
                    param.grad = None
    return list(model.parameters())


def by_hand_with_a_nan() -> Sequence[Tensor]:
    return by_hand(math.nan)


def by_hand_without_clearing() -> Sequence[Tensor]:
    return by_hand(clears=False)


def inside_backward() -> Sequence[Tensor]:
    """One optimizer per parameter, which steps as soon as the gradient has come."""
    model = net()
    optimizers: dict[Tensor, Any] = {}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        optimizers[param] = torch.optim.SGD([param], lr=0.1)
        hooked: Any = param
        hooked.register_post_accumulate_grad_hook(update)
    for step in range(3):
        loss_of(model, step).backward()
    return list(model.parameters())


def accumulated() -> Sequence[Tensor]:
    """Two passes per update, through both kinds of checkpoints."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        x = data(step, 5, 4).requires_grad_()
        hidden = checkpoint(model[0], x, use_reentrant=bool(step % 2))
        model[1:](hidden).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def changed() -> Sequence[Tensor]:
    """The script replaces a parameter and a layer, and swaps another parameter."""
    model: Any = net()
    swap: Any = torch.utils.swap_tensors
    optimizer = sgd(model)
    for step in range(5):
        if step == 1:
            model[3].weight = nn.Parameter(model[3].weight.detach().clone())
            optimizer.add_param_group({"params": [model[3].weight]})
        if step == 2:
            model[2] = nn.ReLU()
        if step == 3:
            model[0].bias.grad = None
            swap(model[0].bias, nn.Parameter(model[0].bias.detach().clone()))
        take_step(optimizer, loss_of(model, step))
    return list(model.parameters())


class Heads(nn.Module):
    """A sparse embedding under a trunk under two heads."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4, sparse=sparse)
        self.trunk = nn.Linear(4, 6)
        self.a_head, self.b_head = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, index: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(self.embedding(index)))
        return self.a_head(hidden), self.b_head(hidden)


def two_heads(*, apart: bool = False) -> Sequence[Tensor]:
    """Two losses on one trunk, in one backward pass or in two."""
    model: Any = Heads()
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        one, other = model(torch.tensor([step, 1, 2]))
        if apart:
            one.square().mean().backward(retain_graph=True)
            (other - 1).square().mean().backward()
        else:
            (one.square().mean() + (other - 1).square().mean()).backward()
        optimizer.step()
    return list(model.parameters())


def two_heads_apart() -> Sequence[Tensor]:
    return two_heads(apart=True)


class LooksUp(nn.Module):
    """Its gradient is sparse, which the names of the model do not show."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(6, 4))
        self.plain = nn.Linear(4, 2)

    def forward(self, index: Tensor) -> Any:
        rows: Tensor = F.embedding(index, self.table, sparse=True)
        return self.plain(rows)


def looks_up() -> Sequence[Tensor]:
    model: Any = LooksUp()
    optimizer = sgd(model)
    for step in range(3):
        take_step(optimizer, model(torch.tensor([step, 1, 2])).square().mean())
    return list(model.parameters())


def captured() -> Sequence[Tensor]:
    """A CUDA graph is captured in the third step, as torch would tell of it."""
    model = net()
    optimizer = sgd(model)
    asked = _torch.is_capturing
    try:
        for step in range(5):
            _torch.is_capturing = (lambda: True) if step == 2 else asked
            take_step(optimizer, loss_of(model, step))
    finally:
        _torch.is_capturing = asked
    return list(model.parameters())


def no_leaf() -> Sequence[Tensor]:
    """One of the parameters was computed, which only `Module.__setattr__` refuses."""
    model = net()
    optimizer = sgd(model)
    made = nn.Parameter(torch.ones(2))
    model._parameters["made"] = made * 2.0  # type: ignore[assignment]
    fit(model, optimizer, steps=3)
    return list(model.parameters())[1:]


PACKAGE = Path(str(gradsurgeon.__file__)).parent
