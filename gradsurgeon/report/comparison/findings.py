"""Findings from the distances of two runs: the border, what modules add, how it goes on."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from gradsurgeon.report.comparison.order import is_inside, parent_of
from gradsurgeon.report.comparison.pairs import Pair

_LAST = 3
_FIRST = 5
# A module adds to a difference if so many times as much goes out as came in: a projection can be several times too
# small.
_ADDS = 10.0
_MODULES = 8
_GROWS = 2.0
# The name of a module, and the number of its call.
_Call = tuple[str, int]


class ModuleDifference(NamedTuple):
    """A module that adds to a difference: the distances of its input and its output."""

    name: str
    came_in: float
    went_out: float


class StepDifference(NamedTuple):
    """How many tensors are apart in a step, and how far."""

    step: int
    compared: int
    apart: int
    median: float
    largest: float


def text_of(pairs: Sequence[Pair], pair: Pair) -> str:
    """Return what to call a tensor, with what tells it from others of its kind and name."""
    alike = [other for other in pairs if (other.kind, other.name) == (pair.kind, pair.name)]
    details = []
    if pair.tensor != pair.base:
        details.append(pair.tensor)
    for number in ("call", "micro_batch"):
        last = max(getattr(other, number) for other in alike)
        if last:
            word = number.replace("_", "-")
            details.append(f"{word} {getattr(pair, number) + 1} of {last + 1}")
    if any(finding.rank for finding in alike):
        details.append(f"rank {pair.rank}")
    text = pair.kind.text(pair.name)
    if not details:
        return text
    return f"{text} ({', '.join(details)})"


def border_of(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Return the last tensors that agree, and the first that do not."""
    apart = [pair for pair in pairs if pair.is_apart]
    if not apart:
        return [], []
    border = apart[0]
    before = pairs[: pairs.index(border)]
    agree = [pair for pair in before if not pair.is_undecided]
    has_modules = any(pair.kind.of_modules for pair in pairs)
    first = []
    for pair in apart:
        is_same = pair.phase == border.phase if has_modules else pair.kind == border.kind
        if is_same and pair.step == border.step:
            first.append(pair)
    if not has_modules:
        # The gradients all part, whatever module is wrong: those of its own weights part most.
        first.sort(key=lambda pair: -pair.ratio)
    return agree[-_LAST:], first[:_FIRST]


def _is_same_pass(pair: Pair, border: Pair) -> bool:
    place = (border.step, border.rank, border.micro_batch)
    return (pair.step, pair.rank, pair.micro_batch) == place


def inside_of(pairs: Sequence[Pair], border: Pair) -> str:
    """Return the innermost module around the first difference of a forward pass whose input agrees, empty if there is none."""
    agree: dict[str, bool] = {}
    for pair in pairs:
        if pair.base == "input" and _is_same_pass(pair, border):
            agree.setdefault(pair.name, True)
            agree[pair.name] &= not pair.is_apart and not pair.is_undecided
    around = border.name if border.base == "output" else parent_of(border.name, agree)
    while around and not agree.get(around):
        around = parent_of(around, agree)
    return around


def modules_of(pairs: Sequence[Pair], border: Pair) -> list[ModuleDifference]:
    """Return the modules that add most to the difference in the pass of the border, in the order of their inputs."""
    # How far the inputs of each call are apart.
    inputs: dict[_Call, float] = {}
    # How far its outputs are apart: as a multiple of the inputs, and as it is.
    outputs: dict[_Call, tuple[float, float]] = {}
    for pair in pairs:
        if pair.is_undecided or pair.state or not _is_same_pass(pair, border):
            continue
        call = (pair.name, pair.call)
        if pair.base == "input":
            inputs[call] = max(pair.distance, inputs.get(call, 0.0))
        elif pair.base == "output" and call in inputs and pair.is_apart:
            times = pair.distance / max(inputs[call], pair.tolerance, 1e-30)
            if times >= _ADDS:
                outputs[call] = max((times, pair.distance), outputs.get(call, (0.0, 0.0)))
    largest_first = sorted(outputs, key=outputs.__getitem__, reverse=True)
    most = [call for call in largest_first if not _is_added_inside(call, inputs, outputs)]
    differences = []
    for call in sorted(most[:_MODULES], key=list(inputs).index):
        name, _ = call
        _, distance = outputs[call]
        differences.append(ModuleDifference(name, inputs[call], distance))
    return differences


def _is_added_inside(
    call: _Call, inputs: Mapping[_Call, float], outputs: Mapping[_Call, tuple[float, float]]
) -> bool:
    """Tell whether a module inside adds the difference of a call: less of it came into that module."""
    name, _ = call
    times, distance = outputs[call]
    limit = _ADDS * distance / times
    for inner_call in outputs:
        inner_name, _ = inner_call
        is_inner = inner_name != name and is_inside(inner_name, name)
        had_it_before = inputs[inner_call] >= limit
        if is_inner and not had_it_before:
            return True
    return False


def steps_of(pairs: Sequence[Pair]) -> Iterator[StepDifference]:
    for step, of_step in groupby(pairs, key=attrgetter("step")):
        compared = [pair for pair in of_step if not pair.is_undecided]
        apart = [pair.distance for pair in compared if pair.is_apart]
        finite = list(filter(math.isfinite, apart))
        middle = median(finite) if finite else 0.0
        largest = max(finite, default=0.0)
        yield StepDifference(step, len(compared), len(apart), middle, largest)


def growth_of(steps: Sequence[StepDifference]) -> str:
    medians = [step.median for step in steps if step.median]
    if len(medians) < 2:  # noqa: PLR2004 # to compare
        return ""
    times = medians[-1] / medians[0]
    if times > _GROWS:
        return "grows"
    if times * _GROWS < 1:
        return "shrinks"
    return "stays"
