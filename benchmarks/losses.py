"""What it costs to see several losses apart: rules on the gradient of each, beside TorchJD.

A trunk under as many heads as there are losses. Each way takes the same step on a model of its own, all of them in
turn, and is told in units of the plain step: forward, backward of the sum, update.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import gradsurgeon
from benchmarks import counts, nets
from benchmarks.machine import EXTRA, version
from benchmarks.measure import Budget, clock, compared, interleave, warm_up
from benchmarks.overhead import Row

GROUP = "losses"
FULL = Budget(rounds=60, seconds=20.0, least=8)
QUICK = Budget(rounds=20, seconds=4.0, least=4)
LOSSES = (2, 8)
OUTPUTS = 8

Step = Callable[[], None]


class Heads(nn.Module):
    """A trunk under heads, one for each loss."""

    def __init__(self, trunk: nn.Module, width: int, heads: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList(nn.Linear(width, OUTPUTS) for _ in range(heads))

    def losses(self, features: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the loss of each head by name."""
        outs = [head(features) for head in self.heads]
        return {
            f"task{place}": nn.functional.mse_loss(out, target)
            for place, (out, target) in enumerate(zip(outs, targets, strict=True))
        }


@dataclass(frozen=True, slots=True)
class Trunk:
    """A kind of trunk and batch.

    Attributes:
        name: what rows call it.
        about: what it is, for the table.
        build: makes it.
        width: of its output.
        shape: of a batch.
    """

    name: str
    about: str
    build: Callable[[], nn.Module]
    width: int
    shape: tuple[int, ...]


def mlp(width: int, layers: int) -> nn.Module:
    """Return linear layers with ReLU behind each."""
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def transformer(width: int, blocks: int) -> nn.Module:
    """Return transformer blocks."""
    return nn.Sequential(*(nets.Block(width, heads=4) for _ in range(blocks)))


TRUNKS = (
    Trunk("mlp", "1.6 M in 6 layers of 512, 64 rows", lambda: mlp(512, 6), 512, (64, 512)),
    Trunk("wide", "6.3 M in 6 layers of 1,024, 64 rows", lambda: mlp(1024, 6), 1024, (64, 1024)),
    Trunk(
        "transformer", "0.8 M in 4 blocks of 128, 8 x 32 tokens", lambda: transformer(128, 4), 128,
        (8, 32, 128),
    ),
)  # fmt: skip


class Task:
    """A model that can be trained for a step; the same numbers each time that it is made."""

    def __init__(self, trunk: Trunk, losses: int, device: str) -> None:
        torch.manual_seed(0)
        self.model = Heads(trunk.build(), trunk.width, losses).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.x = torch.randn(trunk.shape, device=device)
        self.targets = torch.randn(losses, *trunk.shape[:-1], OUTPUTS, device=device)

    def features(self) -> Tensor:
        """Run the trunk."""
        found: Tensor = self.model.trunk(self.x)
        return found

    def losses(self) -> dict[str, Tensor]:
        """Run the model."""
        return self.model.losses(self.features(), self.targets)

    def of_trunk(self) -> list[nn.Parameter]:
        """Return the parameters that all losses share."""
        return list(self.model.trunk.parameters())


@dataclass(frozen=True, slots=True)
class Way:
    """A way to make the gradients.

    Attributes:
        name: what rows call it.
        kind: whose it is.
        attach: puts it on a task; returns what the script calls, and what takes it off again.
        packages: the distributions that it needs beside torch.
    """

    name: str
    kind: str
    attach: Callable[[Task], tuple[Step, Step]]
    packages: tuple[str, ...] = ()


def _plain(task: Task) -> tuple[Step, Step]:
    def backward() -> None:
        torch.autograd.backward(reduce(operator.add, task.losses().values()))

    return backward, _nothing


def _nothing() -> None:
    pass


def _named(task: Task) -> Step:
    def backward() -> None:
        gradsurgeon.backward(task.losses())

    return backward


def _without_rule(task: Task) -> tuple[Step, Step]:
    return _named(task), _nothing


def on_params(**rule: Any) -> Callable[[Task], tuple[Step, Step]]:
    """Return how a rule on the parameters of the trunk is put on."""

    def attach(task: Task) -> tuple[Step, Step]:
        names = [f"task{place}" for place in range(len(task.model.heads))]
        common = {"id": "losses", "params": "trunk.*", "losses": names}
        return _named(task), _applied(task, common | rule)

    return attach


def on_features(**rule: Any) -> Callable[[Task], tuple[Step, Step]]:
    """Return how a rule on what the heads take is put on; the script stays as it is."""

    def attach(task: Task) -> tuple[Step, Step]:
        common = {"id": "losses", "modules": "heads.*", "tensor": "input.grad"}
        return _plain(task)[0], _applied(task, common | rule)

    return attach


def _applied(task: Task, rule: Mapping[str, Any]) -> Step:
    rules = {"version": 1, "rules": [dict(rule)]}
    return gradsurgeon.apply(task.model, rules, optimizer=task.optimizer).remove


def torchjd(aggregator: str, chunk: int | None = None) -> Callable[[Task], tuple[Step, Step]]:
    """Return how TorchJD does it on the parameters of the trunk.

    Args:
        aggregator: the name of its class.
        chunk: how many losses are gone through at once, all of them where not given.
    """

    def attach(task: Task) -> tuple[Step, Step]:
        autojac = import_module("torchjd.autojac")
        aggregate = getattr(import_module("torchjd.aggregation"), aggregator)()
        shared, heads = task.of_trunk(), [list(head.parameters()) for head in task.model.heads]

        def backward() -> None:
            features = task.features()
            losses = list(task.model.losses(features, task.targets).values())
            autojac.mtl_backward(
                losses,
                features,
                tasks_params=heads,
                shared_params=shared,
                parallel_chunk_size=chunk,
            )
            autojac.jac_to_grad(shared, aggregate)

        return backward, _nothing

    return attach


def torchjd_on_features(aggregator: str) -> Callable[[Task], tuple[Step, Step]]:
    """Return how a script does it on the features with TorchJD: the graph is cut there, and joined again."""

    def attach(task: Task) -> tuple[Step, Step]:
        autojac = import_module("torchjd.autojac")
        aggregate = getattr(import_module("torchjd.aggregation"), aggregator)()
        heads = [list(head.parameters()) for head in task.model.heads]

        def backward() -> None:
            features = task.features()
            cut = features.detach().requires_grad_()
            losses = list(task.model.losses(cut, task.targets).values())
            autojac.mtl_backward(losses, cut, tasks_params=heads, shared_params=[cut])
            autojac.jac_to_grad([cut], aggregate)
            features.backward(cut.grad)  # type: ignore[no-untyped-call] # as above

        return backward, _nothing

    return attach


_SOLVERS = ("torchjd", "quadprog", "qpsolvers")
AGAIN, WITHOUT = "plain step again", "`gradsurgeon.backward`, no rule"
BARE = (Way(AGAIN, "baseline", _plain), Way(WITHOUT, "rules", _without_rule))
WAYS = (
    Way("`conflict`", "rules", on_params(action="conflict")),
    Way("`combine`, `upgrad`", "rules", on_params(action="combine", method="upgrad"), _SOLVERS),
    Way("TorchJD `mtl_backward`, `UPGrad`", "peer", torchjd("UPGrad"), _SOLVERS),
    Way("the same, `parallel_chunk_size=1`", "peer", torchjd("UPGrad", chunk=1), _SOLVERS),
    Way(
        "`combine` on features, `upgrad`", "rules",
        on_features(action="combine", method="upgrad"), _SOLVERS,
    ),
    Way("TorchJD on features by hand, `UPGrad`", "peer", torchjd_on_features("UPGrad"), _SOLVERS),
)  # fmt: skip


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per trunk, number of losses, and way."""
    budget = QUICK if quick else FULL
    for trunk in TRUNKS:
        for losses in LOSSES:
            # Apart: while any model has rules, `gradsurgeon.backward` asks whether they are meant.
            for ways in (BARE, WAYS):
                yield from of_trunk(trunk, losses, device, budget, ways)
                gc.collect()


def of_trunk(
    trunk: Trunk, losses: int, device: str, budget: Budget, ways: Sequence[Way]
) -> Iterator[Row]:
    """Yield one row per way, all of them measured in turn."""
    head = {"group": GROUP, "workload": trunk.name, "losses": losses}
    lanes, rows = [_lane(Way("", "baseline", _plain), Task(trunk, losses, device))], []
    for way in ways:
        row: Row = head | {"case": way.name, "kind": way.kind}
        if missing := [name for name in way.packages if version(name) == "missing"]:
            yield row | {"skipped": f"needs {', '.join(missing)}: {EXTRA}"}
            continue
        lane = _lane(way, Task(trunk, losses, device))
        try:
            lane.step()
        except Exception as error:
            if way.kind != "peer":
                raise
            # As in `overhead`: what is measured must not be lost to somebody else's fault.
            yield row | {"skipped": f"did not run: {type(error).__name__}: {error}"}
        else:
            lanes.append(lane)
            rows.append(row)
    steps = [lane.step for lane in lanes]
    try:
        warm_up(steps, budget.seconds / 8)
        base, *times = interleave(steps, clock(device), budget)
        peaks = [lane.peak(device) for lane in lanes]
    finally:
        for lane in lanes:
            lane.detach()
    unit = sum(param.numel() * param.element_size() for param in lanes[0].task.of_trunk())
    for row, case, peak in zip(rows, times, peaks[1:], strict=True):
        yield row | compared(base, case) | {"peak_bytes": peak - peaks[0], "trunk_bytes": unit}


@dataclass(frozen=True, slots=True)
class _Lane:
    task: Task
    backward: Step
    detach: Step

    def step(self) -> None:
        self.task.optimizer.zero_grad()
        self.backward()
        self.task.optimizer.step()

    def peak(self, device: str) -> int:
        """Return the peak of a step; the profiler does not know what was made before it and is freed in it."""
        self.task.optimizer.zero_grad()
        return counts.peak(self.step, device)


def _lane(way: Way, task: Task) -> _Lane:
    return _Lane(task, *way.attach(task))
