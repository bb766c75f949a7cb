"""What people have against a NaN: what it costs while nothing is wrong, and what it says when something is.

One model, one fault at a time. What each way says is kept word for word, without paths.
"""

from __future__ import annotations

import contextlib
import gc
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers, rule_sets
from benchmarks.cases import BARE, Attached, Case, step_of
from benchmarks.machine import ROOT, version
from benchmarks.measure import Budget, clock, interleave, spread, warm_up
from benchmarks.overhead import Row
from benchmarks.workloads import Task

GROUP = "diagnosis"
FULL = Budget(rounds=200, seconds=60.0, least=20)
QUICK = Budget(rounds=20, seconds=6.0, least=5)
OURS, WITHOUT = "nan-trap", "nan-trap, forensics: false"
HEALTHY = "nothing wrong"
_WIDTH, _LENGTH, _BATCH = 128, 64, 8


class Faulty(nn.Module):
    """What stands in the middle of the model, and goes wrong if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.act is None else self.act(x)


class Model(nn.Module):
    """Four layers of a transformer, and a fault between the second and the third."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, dropout=0.0, batch_first=True)
            for _ in range(4)
        ]
        self.layers = nn.Sequential(*layers[:2], Faulty(), *layers[2:])
        self.head = nn.Linear(_WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x))
        return out


@dataclass(slots=True)
class Trained(Task):
    """A task whose batch and loss can go wrong, too."""

    batch: Tensor
    loss: Callable[[Tensor], Tensor]

    def spoil(self, act: Callable[[Tensor], Tensor]) -> None:
        """Have the middle of the model do something."""
        for module in self.model.modules():
            if isinstance(module, Faulty):
                module.act = act


def build(device: str) -> Trained:
    torch.manual_seed(0)
    model = Model().to(device)
    batch = torch.randn(_BATCH, _LENGTH, _WIDTH, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def backward() -> None:
        task.loss(model(task.batch)).backward()  # type: ignore[no-untyped-call] # torch has no types there

    task = Trained(model, optimizer, backward, batch, lambda out: out.square().mean())
    return task


def _in_the_middle(act: Callable[[Tensor], Tensor], task: Trained) -> None:
    task.spoil(act)


def _in_the_batch(task: Trained) -> None:
    task.batch[3, 7, 11] = float("nan")


def _in_the_loss(task: Trained) -> None:
    task.loss = lambda out: (out - out).sum() / (out - out).sum()


def _masked_row(x: Tensor) -> Tensor:
    everything = torch.ones_like(x, dtype=torch.bool)
    return x + x.masked_fill(everything, float("-inf")).softmax(-1)


def _of_half(x: Tensor) -> Tensor:
    return (x.half() * 1e5).float()


FAULTS: Mapping[str, Callable[[Trained], None]] = {
    "root of a negative, masked in the forward pass": partial(
        _in_the_middle, lambda x: torch.where(x > 0, x.sqrt(), x)
    ),
    "root of 0: infinite in the backward pass": partial(
        _in_the_middle, lambda x: x + (x * 0).sqrt()
    ),
    "softmax over a row that is masked out": partial(_in_the_middle, _masked_row),
    "overflow of float16": partial(_in_the_middle, _of_half),
    "NaN in the batch": _in_the_batch,
    "0 / 0 in the loss, outside of the model": _in_the_loss,
}


def _isnan_hooks(task: Task) -> Attached:
    def hook(name: str) -> Callable[[Tensor], None]:
        def check(grad: Tensor) -> None:
            if grad.isnan().any():
                raise FloatingPointError(f"the gradient of {name} is NaN")

        return check

    handles = [
        param.register_hook(hook(name))  # type: ignore[no-untyped-call] # torch has no types there
        for name, param in task.model.named_parameters()
    ]
    return peers.taken_off(handles)


def ways() -> list[Case]:
    """Return the ways, the bare step first."""
    named = {case.name: case for case in peers.cases()}
    return [
        BARE,
        rule_sets.case(WITHOUT, [{"action": "nan-trap", "forensics": False}]),
        rule_sets.case(OURS, [{"action": "nan-trap"}]),
        Case("isnan in a hook of every parameter", "peer", _isnan_hooks),
        named["detect_anomaly"],
        named["DebugUnderflowOverflow"],
    ]


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per way for the healthy step, and one per fault and way for what it says."""
    there = [way for way in ways() if version(way.package or "torch") != "missing"]
    yield from _healthy(there, device, QUICK if quick else FULL)
    gc.collect()
    for fault, spoil in FAULTS.items():
        for way in there[2:]:
            yield {
                "group": GROUP,
                "fault": fault,
                "way": way.name,
                "says": _said(way, spoil, device),
            }


def _healthy(there: list[Case], device: str, budget: Budget) -> Iterator[Row]:
    bare = step_of(build(device), Attached())
    tasks = [build(device) for _ in there]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        made = [way.attach(task) for way, task in zip(there, tasks, strict=True)]
        lanes = [bare, *map(step_of, tasks, made)]
        warm_up(lanes, budget.seconds / 10)
        base, *times = interleave(lanes, clock(device), budget)
    for attached in made:
        attached.detach()
    for way, own in zip(there, times, strict=True):
        ratios = [later / sooner for sooner, later in zip(base, own, strict=True)]
        row: dict[str, Any] = {"ratio": spread(ratios).to_dict()}
        if way.name == OURS:
            # Beside the same trap without it: what keeping the calls costs, in units of a step.
            off = times[[case.name for case in there].index(WITHOUT)]
            kept = [1 + (a - b) / c for a, b, c in zip(own, off, base, strict=True)]
            row["forensics"] = spread(kept).to_dict()
        yield {"group": GROUP, "fault": HEALTHY, "way": way.name} | row


def _said(way: Case, spoil: Callable[[Trained], None], device: str) -> str:
    """Return what a way says of one step with a fault, without the folder that this package lies in."""
    task = build(device)
    spoil(task)
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore")
        attached = way.attach(task)
        try:
            step_of(task, attached)()
            said = "(nothing)"
        except Exception as error:  # noqa: BLE001 # each has a kind of its own
            said = str(error)
        finally:
            attached.detach()
    return said.replace(f"{ROOT}/", "").strip()
