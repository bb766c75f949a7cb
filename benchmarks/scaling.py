"""How the cost of rules grows: with tensors, with their size, with rules."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks import rule_sets
from benchmarks.cases import Case, step_of
from benchmarks.measure import Budget, rounded
from benchmarks.overhead import FULL, QUICK, Bare, Row
from benchmarks.workloads import given

GROUP = "scaling"


@dataclass(frozen=True, slots=True)
class Axis:
    """Something that grows.

    Attributes:
        name: what grows.
        about: what stays as it is.
        places: where it is measured.
        quick: where in the quick mode.
        shape: from the place to number and size of the tensors.
        rules: from the place to the rules.
    """

    name: str
    about: str
    places: tuple[int, ...]
    quick: tuple[int, ...]
    shape: Callable[[int], tuple[int, int]]
    rules: Callable[[int], Sequence[rule_sets.RuleDict]]


def _observing(_: int) -> list[rule_sets.RuleDict]:
    return rule_sets.together()[rule_sets.OBSERVE]


def _shares(count: int, options: rule_sets.RuleDict) -> list[rule_sets.RuleDict]:
    """Return rules that share a thousand tensors between them, none of which two rules match."""
    width = 1000 // count
    starts = range(0, count * width, width)
    return [{"params": f"{{{start}..{start + width - 1}}}", **options} for start in starts]


def _scaling(count: int) -> list[rule_sets.RuleDict]:
    return _shares(count, {"action": "scale", "at": "step", "factor": 0.5})


def _logging(count: int) -> list[rule_sets.RuleDict]:
    return _shares(count, {"action": "norm-log"})


AXES = (
    Axis(
        "tensors",
        f"{rule_sets.OBSERVE}, tensors of 64",
        (100, 1_000, 10_000, 100_000),
        (100, 1_000),
        lambda place: (place, 64),
        _observing,
    ),
    Axis(
        "elements per tensor",
        f"{rule_sets.OBSERVE}, 200 tensors",
        (16, 256, 4_096, 65_536),
        (16, 4_096),
        lambda place: (200, place),
        _observing,
    ),
    Axis(
        "rules that edit",
        "scale at step, 1,000 tensors of 64 shared out between the rules",
        (1, 10, 100, 1_000),
        (1, 100),
        lambda _: (1_000, 64),
        _scaling,
    ),
    Axis(
        "rules that log",
        "norm-log, 1,000 tensors of 64 shared out between the rules",
        (1, 10, 100, 1_000),
        (1, 100),
        lambda _: (1_000, 64),
        _logging,
    ),
)


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per axis and place."""
    for axis in AXES:
        for place in axis.quick if quick else axis.places:
            row = {"group": GROUP, "axis": axis.name, "about": axis.about, "at": place}
            yield row | at(axis, place, device, budget=QUICK if quick else FULL)


def at(axis: Axis, place: int, device: str, *, budget: Budget) -> Row:
    """Return what rules cost at one place of an axis, and what it takes to put them on."""
    build = given(*axis.shape(place))
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
    return found | {"apply_s": rounded(apply_s)}
