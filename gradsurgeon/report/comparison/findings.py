"""What the distances of two runs say: the border, what modules add, how it goes on. Needs numpy."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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

_LAST, _FIRST = 3, 5
# A module adds to a difference if so many times as much goes out as came in: a projection can be several times too
# small.
_ADDS, _MODULES, _GROWS = 10.0, 8, 2.0
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
    alike = pairs.cells[pairs.like(at, "kind", "name")]
    more = [] if kind.tensor == kind.base else [kind.tensor]
    for key, word in (("call", "call"), ("part", "micro-batch")):
        if number := int(alike[key].max()):
            more.append(f"{word} {cell[key] + 1} of {number + 1}")
    if alike["rank"].any():
        more.append(f"rank {cell['rank']}")
    text = pairs.text(at)
    if more:
        text += f" ({', '.join(more)})"
    why = _STATES.get(int(cell["state"]), "")
    if not why and np.isinf(cell["distance"]):
        is_finite = np.isfinite(cell["values"][0, :3]).all()
        why = f"non-finite in the {'reference' if is_finite else 'run'}"
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
        why=why,
        text=text,
    )


def border_of(pairs: Pairs) -> tuple[list[int], list[int]]:
    apart = np.flatnonzero(pairs.apart)
    if not len(apart):
        return [], []
    border = apart[0]
    agree = np.flatnonzero(~pairs.cells["undecided"][:border])
    here = apart[pairs.cells["step"][apart] == pairs.cells["step"][border]].tolist()
    here = [at for at in here if pairs.kind(at).phase == pairs.kind(border).phase]
    if not of_modules(pairs.cells).any():
        # The gradients all part, whatever module is wrong: those of its own weights part most.
        here = [at for at in here if pairs.kind(at) == pairs.kind(border)]
        here.sort(key=lambda at: -pairs.ratio[at])
    return agree[-_LAST:].tolist(), here[:_FIRST]


def inside_of(pairs: Pairs, border: int) -> str:
    kind, name = pairs.kind(border), pairs.name(border)
    inputs = pairs.of_base("input") & pairs.like(border, "step", "rank", "part")
    agree: dict[str, bool] = {}
    unlike = pairs.apart | pairs.cells["undecided"]
    for at in np.flatnonzero(inputs).tolist():
        fine = not unlike[at]
        agree[pairs.name(at)] = agree.get(pairs.name(at), True) and fine
    around = name if kind.base == "output" else parent_of(name, agree)
    while around and not agree.get(around):
        around = parent_of(around, agree)
    return around if kind.phase == "forward" else ""


def modules_of(pairs: Pairs, border: int) -> list[ModuleDifference]:
    same = pairs.like(border, "step", "rank", "part") & ~pairs.cells["undecided"]
    came: dict[tuple[str, int], float] = {}
    # In the order of inputs: the module, and how far its input was apart at least.
    added: dict[tuple[str, int], tuple[ModuleDifference, float]] = {}
    apart = pairs.apart
    for at in np.flatnonzero(same & (pairs.cells["state"] == BOTH)).tolist():
        base = pairs.kind(at).base
        key = pairs.name(at), int(pairs.cells["call"][at])
        distance = float(pairs.cells["distance"][at])
        if base == "input":
            came[key] = max(distance, came.get(key, 0.0))
        elif base == "output" and key in came and apart[at]:
            start = max(came[key], float(pairs.cells["limit"][at]), 1e-30)
            known = added[key][0].went_out if key in added else 0.0
            if distance >= _ADDS * start and distance > known:
                added[key] = ModuleDifference(key[0], came[key], distance), start

    inner = []
    for key, (module, start) in added.items():
        # A module inside adds the difference if no more came into it.
        has_cause_inside = any(
            is_inside(other.name, module.name)
            and other.name != module.name
            and other.came_in < _ADDS * start
            for other, _ in added.values()
        )
        if not has_cause_inside:
            inner.append(key)
    inner.sort(key=lambda key: -added[key][0].went_out / added[key][1])
    order = list(came)
    return [added[key][0] for key in sorted(inner[:_MODULES], key=order.index)]


def steps_of(pairs: Pairs) -> Iterator[StepDifference]:
    cells, apart = pairs.cells, pairs.apart
    for step in np.unique(cells["step"]).tolist():
        here = cells["step"] == step
        far = cells["distance"][here & apart & np.isfinite(cells["distance"])]
        compared, number = int((here & ~cells["undecided"]).sum()), int((here & apart).sum())
        median = float(np.median(far)) if len(far) else 0.0
        yield StepDifference(step, compared, number, median, far.max(initial=0.0).item())


def growth_of(steps: Sequence[StepDifference]) -> str:
    medians = [step.median for step in steps if step.median]
    if len(medians) < 2:  # noqa: PLR2004 # to compare
        return ""
    times = medians[-1] / medians[0]
    return "grows" if times > _GROWS else "shrinks" if times * _GROWS < 1 else "stays"


def largest_of(pairs: Pairs) -> int:
    """Return the tensor with the largest ratio of distance and tolerance, -1 if rounding decides all."""
    decided = np.flatnonzero(~pairs.cells["undecided"])
    return int(decided[np.argmax(pairs.ratio[decided])]) if len(decided) else -1
