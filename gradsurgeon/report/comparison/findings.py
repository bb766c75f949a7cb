"""What the distances of two runs say: the border, what modules add, how it goes on. Needs numpy."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradsurgeon.report.comparison.alignment import (
    BOTH,
    MISSING_IN_REFERENCE,
    MISSING_IN_RUN,
    RESIZED,
    Pairs,
    of_modules,
)
from gradsurgeon.report.comparison.order import is_inside, parent_of

_LAST = 3
_FIRST = 5
# A module adds to a difference if so many times as much goes out as came in: a projection can be several times too
# small.
_ADDS = 10.0
_MODULES = 8
_GROWS = 2.0
_STATES = {
    MISSING_IN_RUN: "missing in the run",
    MISSING_IN_REFERENCE: "missing in the reference",
    RESIZED: "another number of elements",
}


class TensorDifference(NamedTuple):
    """A tensor of one step in both runs.

    `distance` and `tolerance` are relative to the norm; `why` says why there is no distance.
    """

    name: str
    tensor: str
    step: int
    phase: str
    micro_batch: int
    call: int
    rank: int
    distance: float
    tolerance: float
    why: str
    text: str


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


def tensor_of(pairs: Pairs, at: int) -> TensorDifference:
    cell = pairs.cells[at]
    kind = pairs.kind(at)
    return TensorDifference(
        name=pairs.name(at),
        tensor=kind.tensor,
        step=int(cell["step"]),
        phase=kind.phase,
        micro_batch=int(cell["part"]),
        call=int(cell["call"]),
        rank=int(cell["rank"]),
        distance=float(cell["distance"]),
        tolerance=float(cell["limit"]),
        why=_why_no_distance(cell),
        text=_text_of(pairs, at),
    )


def _text_of(pairs: Pairs, at: int) -> str:
    """Return what to call a tensor, with what tells it from others of its kind and name."""
    cell = pairs.cells[at]
    kind = pairs.kind(at)
    alike = pairs.cells[pairs.like(at, "kind", "name")]
    details = []
    if kind.tensor != kind.base:
        details.append(kind.tensor)
    for key, word in (("call", "call"), ("part", "micro-batch")):
        last = int(alike[key].max())
        if last:
            details.append(f"{word} {cell[key] + 1} of {last + 1}")
    if alike["rank"].any():
        details.append(f"rank {cell['rank']}")
    text = pairs.text(at)
    if details:
        text += f" ({', '.join(details)})"
    return text


def _why_no_distance(cell: Any) -> str:
    state = int(cell["state"])
    if state != BOTH:
        return _STATES[state]
    if not np.isinf(cell["distance"]):
        return ""
    if np.isfinite(cell["values"][0, :3]).all():
        return "non-finite in the reference"
    return "non-finite in the run"


def border_of(pairs: Pairs) -> tuple[list[int], list[int]]:
    """Return the places of the last tensors that agree, and of the first that do not."""
    apart = np.flatnonzero(pairs.apart)
    if not len(apart):
        return [], []
    border = apart[0]
    agree = np.flatnonzero(~pairs.cells["undecided"][:border])
    # The gradients all part, whatever module is wrong: those of its own weights part most.
    has_modules = of_modules(pairs.cells).any()
    key = "phase" if has_modules else "kind"
    same = pairs.like(border, "step", key)
    first = apart[same[apart]].tolist()
    if not has_modules:
        ratio = pairs.ratio
        first.sort(key=ratio.__getitem__, reverse=True)
    return agree[-_LAST:].tolist(), first[:_FIRST]


def inside_of(pairs: Pairs, border: int) -> str:
    """Return the innermost module around the first difference whose input agrees, empty if there is none."""
    kind = pairs.kind(border)
    if kind.phase != "forward":
        return ""
    name = pairs.name(border)
    inputs = pairs.of_base("input") & pairs.like(border, "step", "rank", "part")
    unlike = pairs.apart | pairs.cells["undecided"]
    agree: dict[str, bool] = {}
    for at in np.flatnonzero(inputs).tolist():
        module = pairs.name(at)
        if unlike[at]:
            agree[module] = False
        else:
            agree.setdefault(module, True)
    around = name if kind.base == "output" else parent_of(name, agree)
    while around and not agree.get(around):
        around = parent_of(around, agree)
    return around


def modules_of(pairs: Pairs, border: int) -> list[ModuleDifference]:
    """Return the modules that add most to the difference in the pass of the border, in the order of their inputs."""
    cells = pairs.cells
    same = pairs.like(border, "step", "rank", "part") & ~cells["undecided"]
    apart = pairs.apart
    came: dict[tuple[str, int], float] = {}
    # What goes out, by module and call, as a multiple of what came in.
    times: dict[tuple[str, int], float] = {}
    went: dict[tuple[str, int], float] = {}
    for at in np.flatnonzero(same & (cells["state"] == BOTH)).tolist():
        base = pairs.kind(at).base
        name = pairs.name(at)
        key = name, int(cells["call"][at])
        distance = float(cells["distance"][at])
        if base == "input":
            came[key] = max(distance, came.get(key, 0.0))
        elif base == "output" and key in came and apart[at]:
            start = max(came[key], float(cells["limit"][at]), 1e-30)
            if distance >= _ADDS * start:
                times[key] = max(distance / start, times.get(key, 0.0))
                went[key] = max(distance, went.get(key, 0.0))
    most = []
    for key in sorted(times, key=times.__getitem__, reverse=True):
        # A module inside adds the difference if no more came into it.
        limit = _ADDS * went[key] / times[key]
        inner = [other for other in times if is_inside(other[0], key[0]) and other[0] != key[0]]
        if all(came[other] >= limit for other in inner):
            most.append(key)
    most = sorted(most[:_MODULES], key=list(came).index)
    return [ModuleDifference(name, came[name, call], went[name, call]) for name, call in most]


def steps_of(pairs: Pairs) -> Iterator[StepDifference]:
    cells = pairs.cells
    all_apart = pairs.apart
    is_finite = np.isfinite(cells["distance"])
    for step in np.unique(cells["step"]).tolist():
        is_in_step = cells["step"] == step
        apart = is_in_step & all_apart
        compared = is_in_step & ~cells["undecided"]
        distances = cells["distance"][apart & is_finite]
        median = 0.0
        largest = 0.0
        if len(distances):
            median = float(np.median(distances))
            largest = float(distances.max())
        yield StepDifference(step, int(compared.sum()), int(apart.sum()), median, largest)


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


def largest_of(pairs: Pairs) -> int:
    """Return the tensor with the largest ratio of distance and tolerance, -1 if rounding decides all."""
    decided = np.flatnonzero(~pairs.cells["undecided"])
    if not len(decided):
        return -1
    ratios = pairs.ratio[decided]
    return int(decided[ratios.argmax()])
