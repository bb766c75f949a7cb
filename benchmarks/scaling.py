"""How the cost of rules grows: with tensors, with their size, with rules, with modules; and what surrounds it."""

from __future__ import annotations

import gc
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks import curves, rule_sets
from benchmarks.cases import Case, step_of
from benchmarks.measure import Budget, exponent, rounded
from benchmarks.overhead import QUICK, Bare, Row
from benchmarks.workloads import Task, deep_mlp, given

GROUP = "scaling"
# The largest places take seconds per round: fewer rounds than for what a step costs.
FULL = Budget(rounds=100, seconds=0.6, least=3)
# Tracing memory takes several times as long as what it traces.
_MOST_TRACED_S = 2.0


@dataclass(frozen=True, slots=True)
class Axis:
    """Something that grows.

    Attributes:
        name: what grows.
        about: what stays as it is.
        places: where it is measured.
        quick: where in the quick mode.
        build: from the place to what makes the model on a kind of device.
        rules: from the place to the rules.
    """

    name: str
    about: str
    places: tuple[int, ...]
    quick: tuple[int, ...]
    build: Callable[[int], Callable[[str], Task]]
    rules: Callable[[int], Sequence[rule_sets.RuleDict]]


def _observing(_: int) -> list[rule_sets.RuleDict]:
    return rule_sets.together()[rule_sets.OBSERVE]


def _shares(count: int, options: rule_sets.RuleDict) -> list[rule_sets.RuleDict]:
    """Return rules that share a thousand tensors between them; where there are too few, several take the same."""
    width = max(1, 1000 // count)
    starts = (number * width % 1000 for number in range(count))
    return [{"params": f"{{{start}..{start + width - 1}}}", **options} for start in starts]


def _scaling(count: int) -> list[rule_sets.RuleDict]:
    return _shares(count, {"action": "scale", "at": "step", "factor": 0.5})


def _logging(count: int) -> list[rule_sets.RuleDict]:
    return _shares(count, {"action": "norm-log"})


def _clipping(count: int) -> list[rule_sets.RuleDict]:
    return [{"action": "clip-norm", "at": "step", "per": "rule", "max_norm": 1e-3}] * count


def _on_modules(_: int) -> list[rule_sets.RuleDict]:
    return [
        {"modules": "*", "action": "norm-log", "tensor": "output.grad"},
        {"modules": "*", "action": "nan-trap", "tensor": "output"},
    ]


AXES = (
    Axis(
        "tensors",
        f"{rule_sets.OBSERVE}, tensors of 64",
        (100, 1_000, 10_000, 100_000),
        (100, 1_000),
        lambda place: given(place, 64),
        _observing,
    ),
    Axis(
        "elements per tensor",
        f"{rule_sets.OBSERVE}, 200 tensors",
        (16, 256, 4_096, 65_536),
        (16, 4_096),
        lambda place: given(200, place),
        _observing,
    ),
    Axis(
        "rules that edit",
        "scale at step, 1,000 tensors of 64 shared out between the rules",
        (1, 10, 100, 1_000, 10_000),
        (1, 100),
        lambda _: given(1_000, 64),
        _scaling,
    ),
    Axis(
        "rules that log",
        "norm-log, 1,000 tensors of 64 shared out between the rules",
        (1, 10, 100, 1_000, 10_000),
        (1, 100),
        lambda _: given(1_000, 64),
        _logging,
    ),
    Axis(
        "rules on the same tensors",
        "clip-norm per rule at step, 4 tensors of 64 that all rules take",
        (1, 10, 100, 1_000),
        (1, 100),
        lambda _: given(4, 64),
        _clipping,
    ),
    Axis(
        "modules",
        "norm-log of every module's output.grad and nan-trap of its output, MLP of so many layers of 16",
        (10, 100, 1_000, 10_000),
        (10, 100),
        lambda place: partial(deep_mlp, layers=place),
        _on_modules,
    ),
)


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per axis and place, and one per curve and place."""
    # What is imported and cached by the first rules of a process is no part of the first place.
    rule_sets.case("first", _observing(0)).attach(given(2, 2)(device)).detach()
    for axis in AXES:
        for place in axis.quick if quick else axis.places:
            row = {"group": GROUP, "axis": axis.name, "about": axis.about, "at": place}
            yield row | at(axis, place, device, budget=QUICK if quick else FULL)
            gc.collect()
    for row in curves.rows(quick=quick):
        yield {"group": GROUP, **row}


def at(axis: Axis, place: int, device: str, *, budget: Budget) -> Row:
    """Return what rules cost at one place of an axis, and what it takes to put them on."""
    build = axis.build(place)
    bare, task = Bare(build(device), device), build(device)
    case: Case = rule_sets.case(axis.name, axis.rules(place))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin = time.process_time()
        attached = case.attach(task)
        apply_s = time.process_time() - begin
        try:
            found = bare.against(step_of(task, attached), budget)
        finally:
            attached.detach()
        row = found | {"apply_s": rounded(apply_s)}
        return row | {"bytes": _kept(case, task)} if apply_s < _MOST_TRACED_S else row


def _kept(case: Case, task: Task) -> int:
    """Return how many bytes Python keeps for rules that are put on; tensors are not among them."""
    gc.collect()
    tracemalloc.start()
    try:
        attached = case.attach(task)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        attached.detach()


_COSTS: dict[str, Callable[[Row], float | None]] = {
    "extra": lambda row: row["extra_us"]["median"] if "extra_us" in row else None,
    "`apply`": lambda row: row.get("apply_s"),
    "time": lambda row: row.get("seconds"),
    "bytes": lambda row: row.get("bytes"),
}


def exponents(rows: Sequence[Row]) -> dict[str, float]:
    """Return the exponent of each cost that the rows of one axis have, by name."""
    found: dict[str, float] = {}
    for name, cost in _COSTS.items():
        points = [(row["at"], value) for row in rows if (value := cost(row)) is not None]
        power = exponent(points)
        if power is not None:
            found[name] = power
    return found
