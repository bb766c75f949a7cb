"""What the distances of two runs say: the border, what modules add, how it goes on. Needs numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gradsurgeon.comparison.alignment import (
    BOTH,
    MISSING_IN_REFERENCE,
    MISSING_IN_RUN,
    RESIZED,
    Pairs,
)
from gradsurgeon.comparison.order import parent_of
from gradsurgeon.comparison.reading import Kind
from gradsurgeon.report.spikes import Ints

_LAST, _FIRST = 3, 8
_ADDS = 3.0  # a module that passes on so many times what came in
_MODULES = 8
_GROWS = 2.0
_WORDS = {
    "input": "input of {}",
    "output": "output of {}",
    "output.grad": "output gradient of {}",
    "input.grad": "input gradient of {}",
    "grad": "gradient of {}",
    "value": "weight {} after the update",
    "update": "update of {}",
}
_STATES = {
    MISSING_IN_RUN: "missing in the run",
    MISSING_IN_REFERENCE: "missing in the reference",
    RESIZED: "another number of elements",
}


@dataclass(frozen=True)
class Tensor:
    """A tensor of one step, in both runs.

    Attributes:
        name: its module or parameter.
        tensor: which tensor of it, such as `input`, `output.grad`, `grad` or `value`.
        step: the step.
        phase: `forward`, `backward`, `gradient` or `update`.
        micro_batch: the number of the micro-batch.
        call: the number of the call within the micro-batch.
        rank: the rank.
        distance: how far the runs are apart, relative to the norm.
        tolerance: the distance that is allowed.
        why: why there is no distance, such as "missing in the run"; empty if there is one.
        text: the tensor in words.
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


@dataclass(frozen=True)
class Module:
    """What a module adds to a difference.

    Attributes:
        name: the module.
        came_in: the distance of its input.
        went_out: the distance of its output.
    """

    name: str
    came_in: float
    went_out: float


@dataclass(frozen=True)
class Step:
    """How far the runs are apart in one step.

    Attributes:
        step: the step.
        compared: the number of tensors whose distance says something.
        apart: the number of tensors that are apart.
        median: the median distance of the tensors that are apart.
        largest: the largest distance of them.
    """

    step: int
    compared: int
    apart: int
    median: float
    largest: float


def tensor_of(pairs: Pairs, at: int) -> Tensor:
    kind = pairs.kinds[pairs.kind[at]]
    name = pairs.names[pairs.kind[at]][pairs.name[at]]
    same = (pairs.kind == pairs.kind[at]) & (pairs.step == pairs.step[at])
    call, part, rank = (int(one[at]) for one in (pairs.call, pairs.part, pairs.rank))
    text = words(kind, name)
    if pairs.call[same & (pairs.name == pairs.name[at])].any():
        text += f", call {call}"
    if pairs.part[same].any():
        text += f", micro-batch {part}"
    if pairs.rank[same].any():
        text += f", rank {rank}"
    why = _STATES.get(int(pairs.state[at]), "")
    if not why and np.isinf(pairs.distance[at]):
        why = "non-finite in the run" if not np.isfinite(pairs.norms[at, 0]) else ""
        why = why or "non-finite in the reference"
    return Tensor(
        name, kind.tensor, int(pairs.step[at]), kind.phase, part, call, rank,
        float(pairs.distance[at]), float(pairs.limit[at]), why, text,
    )  # fmt: skip


def words(kind: Kind, name: str) -> str:
    text = _WORDS.get(kind.base, f"{kind.base} of {{}}").format(name)
    return text if kind.tensor == kind.base else f"{text} ({kind.tensor})"


def border_of(pairs: Pairs) -> tuple[list[int], list[int]]:
    """Return the last tensors that agree and the first that do not, in the order of execution."""
    apart = np.flatnonzero(pairs.apart)
    if not len(apart):
        return [], []
    border = apart[0]
    phases = np.array([kind.phase for kind in pairs.kinds])[pairs.kind]
    here = apart[(pairs.step[apart] == pairs.step[border]) & (phases[apart] == phases[border])]
    agree = np.flatnonzero(~pairs.undecided[:border] & (pairs.state[:border] == BOTH))
    return agree[-_LAST:].tolist(), here[:_FIRST].tolist()


def inside_of(pairs: Pairs, border: int) -> str:
    """Return the innermost module around the border whose input agrees, empty if there is none."""
    inputs = [number for number, kind in enumerate(pairs.kinds) if kind.base == "input"]
    kind = pairs.kinds[pairs.kind[border]]
    if kind.phase != "forward" or not inputs:
        return ""
    known = {name: place for place, name in enumerate(pairs.names[inputs[0]])}
    name = pairs.names[pairs.kind[border]][pairs.name[border]]
    same = (pairs.kind == inputs[0]) & ~pairs.undecided
    for column in (pairs.step, pairs.rank, pairs.part):
        same &= column == column[border]
    if kind.base == "input" or name not in known:
        name = parent_of(name, known)
    while name:
        calls = np.flatnonzero(same & (pairs.name == known[name]))
        if len(calls) and not pairs.apart[calls].any():
            return name
        name = parent_of(name, known)
    return ""


def modules_of(pairs: Pairs, border: int) -> list[Module]:
    """Return the modules that add to the difference in the forward pass of the border, in the order of execution."""
    same = np.ones(len(pairs.step), bool)
    for column in (pairs.step, pairs.rank, pairs.part):
        same &= column == column[border]
    came: dict[tuple[str, int], int] = {}
    added: list[tuple[float, int, Module]] = []
    for at in np.flatnonzero(same & ~pairs.undecided & (pairs.state == BOTH)).tolist():
        kind = pairs.kinds[pairs.kind[at]]
        key = pairs.names[pairs.kind[at]][pairs.name[at]], int(pairs.call[at])
        if kind.base == "input":
            came[key] = at
        elif kind.base == "output" and key in came and pairs.apart[at]:
            before, after = (float(pairs.distance[one]) for one in (came[key], at))
            times = after / max(before, float(pairs.limit[at]), 1e-30)
            if times >= _ADDS and before < np.inf:
                added.append((times, at, Module(key[0], before, after)))
    # The module around another one adds what the inner one adds.
    found = {module.name for _, _, module in added}
    inner = [one for one in added if not any(name.startswith(f"{one[2].name}.") for name in found)]
    largest = sorted(inner, key=lambda one: -one[0])[:_MODULES]
    return [module for _, _, module in sorted(largest, key=lambda one: one[1])]


def steps_of(pairs: Pairs) -> Iterator[Step]:
    for step in np.unique(pairs.step).tolist():
        here = pairs.step == step
        apart = here & pairs.apart
        far = pairs.distance[apart & np.isfinite(pairs.distance)]
        yield Step(
            step,
            int((here & ~pairs.undecided).sum()),
            int(apart.sum()),
            float(np.median(far)) if len(far) else 0.0,
            float(far.max(initial=0.0)),
        )


def growth_of(steps: list[Step]) -> Literal["", "grows", "stays", "shrinks"]:
    """Return how the distance goes on, empty if the runs are apart in fewer than two steps."""
    apart = [step.median for step in steps if step.apart and step.median]
    if len(apart) < 2:  # noqa: PLR2004 # a beginning and an end
        return ""
    if apart[-1] > _GROWS * apart[0]:
        return "grows"
    return "shrinks" if apart[-1] * _GROWS < apart[0] else "stays"


def undecided_names(pairs: Pairs) -> list[str]:
    found: dict[str, None] = {}
    for at in np.flatnonzero(pairs.undecided).tolist():
        kind = pairs.kinds[pairs.kind[at]]
        found[words(kind, pairs.names[pairs.kind[at]][pairs.name[at]])] = None
    return list(found)


def largest_of(pairs: Pairs) -> int:
    """Return the decided tensor with the largest ratio of distance and tolerance, -1 without any."""
    decided: Ints = np.flatnonzero(~pairs.undecided)
    return int(decided[np.argmax(pairs.ratio[decided])]) if len(decided) else -1
