"""The fingerprints of a run as arrays, under names that other runs share. Needs numpy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.report.spikes import Floats, Ints
from gradsurgeon.store.layout import section
from gradsurgeon.store.rank_file import StoredSeries
from gradsurgeon.store.run import Run, of_lowest_ranks
from gradsurgeon.store.tables import arrays

PROJECTIONS = ("projection_1", "projection_2")
# The columns of the values: a norm, two projections, and the number of elements.
STATS = ("l2", *PROJECTIONS, "numel")
_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
PHASES = ("forward", "backward", "gradient", "update")


class Kind(NamedTuple):
    """A kind of tensor, such as the output of modules, and the point at which it was measured."""

    tensor: str
    point: str

    @property
    def base(self) -> str:
        """Return `input`, `output`, `output.grad` ... without the path inside a tuple."""
        ends = re.match(r"(?:in|out)put(?=[.\[]|$)", self.tensor)
        return ends[0] + ".grad" * self.tensor.endswith(".grad") if ends else self.tensor

    @property
    def of_modules(self) -> bool:
        return self.base.startswith(("input", "output"))

    @property
    def phase(self) -> str:
        if self.of_modules:
            return PHASES[self.base.endswith(".grad")]
        return "gradient" if self.tensor == "grad" else "update"


@dataclass(frozen=True)
class Cells:
    """The numbers of one kind of tensor, sorted by step, rank, name, and row within the step.

    Attributes:
        names: the names, in the order of the model.
        chains: names in the order in which they first ran.
        step: the step of each cell.
        rank: its rank, 0 for parameters.
        name: its place in `names`.
        row: its number among the cells of the same step, rank and name.
        values: its `STATS`, of shape `[cells, 4]`.
    """

    names: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]
    step: Ints
    rank: Ints
    name: Ints
    row: Ints
    values: Floats

    def named(self, names: Sequence[str]) -> Ints:
        """Return the name of each cell as its place in other names, -1 where it is not among them."""
        places = {name: place for place, name in enumerate(names)}
        table = np.array([places.get(name, -1) for name in self.names], np.int64)
        return table[self.name]

    def counts(self) -> Ints:
        """Return how many rows the step of each cell has of its name."""
        starts = np.flatnonzero(self.row == 0)
        sizes = np.diff(np.append(starts, len(self.row)))
        return np.repeat(sizes, sizes)


@dataclass(frozen=True)
class Reading:
    """The fingerprints of one run, and its description."""

    path: str
    meta: Mapping[str, Any]
    kinds: Mapping[Kind, Cells]
    ranks: int

    @property
    def steps(self) -> Ints:
        return np.unique(np.concatenate([cells.step for cells in self.kinds.values()]))


def stripped(name: str) -> str:
    """Return a name without the segments that wrappers add.

    >>> stripped("module.h.0._orig_mod.attn.weight")
    'h.0.attn.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def read(run: Run, rename: Callable[[str], str] = lambda name: name) -> Reading:
    """Return the fingerprints of a run.

    Args:
        run: the run.
        rename: returns the name under which a tensor is compared.

    Raises:
        RecordError: no rule recorded fingerprints, or none of them has a row yet.
    """
    kinds: dict[Kind, Cells] = {}
    of_params = {series for series, _ in of_lowest_ranks(run)}
    repeated = dict(of_lowest_ranks(run))
    groups: dict[str, list[dict[str, StoredSeries]]] = {}
    for group in _groups(run):
        groups.setdefault(group["l2"].key.rule, []).append(group)
    for rule in run.rules:
        kind = Kind(str(rule.get("tensor") or "grad"), str(rule.get("point") or ""))
        of_rule = groups.get(rule["id"], [])
        if not kind.of_modules:
            of_rule = [group for group in of_rule if group["l2"] in of_params]
        if not of_rule or kind in kinds:
            continue
        bound = dict.fromkeys((*run.params, *run.names_of(rule["id"])))
        names = _compared(bound if not kind.of_modules else run.names_of(rule["id"]), rename)
        without = {} if kind.of_modules else repeated
        if cells := _cells(of_rule, names, without, ranked=kind.of_modules):
            kinds[kind] = cells
    if not kinds:
        raise RecordError(_nothing(run))
    ranks = run.meta.get("ranks")
    return Reading(str(run.path), run.meta, kinds, ranks if isinstance(ranks, int) else 1)


def _nothing(run: Run) -> str:
    where = printable(str(run.path))
    stats = sorted({series.key.stat for series in run})
    found = f"it recorded {', '.join(map(printable, stats))}" if stats else "it recorded nothing"
    return (
        f"{where}: has no fingerprints to compare, which are `l2` and `projection` of the same rule; {found}; "
        "record it with the rules `gradsurgeon:fingerprint@1`"
    )


def _groups(run: Run) -> Iterator[dict[str, StoredSeries]]:
    """Yield the series that measure the same tensors, by statistic, where all that is needed is there."""
    found: dict[tuple[object, ...], dict[str, StoredSeries]] = {}
    for series in run:
        rule, stat, point, names = series.key
        found.setdefault((series.rank, rule, point, names), {})[stat] = series
    return (group for group in found.values() if {"l2", *PROJECTIONS} <= group.keys())


def _compared(names: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Return the name under which each tensor is compared. A wrapper and the module inside it are one."""
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name.count(".")):
        found.setdefault(rename(stripped(name)), name)
    found.pop("", None)
    places = {name: place for place, name in enumerate(names)}
    pairs = sorted(found.items(), key=lambda pair: places[pair[1]])
    return {name: new for new, name in pairs}


def _cells(
    groups: Sequence[Mapping[str, StoredSeries]],
    names: Mapping[str, str],
    without: Mapping[StoredSeries, frozenset[int]],
    *,
    ranked: bool,
) -> Cells | None:
    places = {name: place for place, name in enumerate(names)}
    parts = []
    for group in groups:
        series = group["l2"]
        # A run that is still being written may have one more row of one statistic.
        rows = min(len(group[stat]) for stat in ("l2", *PROJECTIONS))
        width = len(series.key.names)
        tables = {
            stat: arrays(list(one.stored(0, rows)), width) for stat, one in group.items() if rows
        }
        if not rows:
            continue
        steps, _, present = tables["l2"]
        lost = without.get(series, frozenset())
        table = np.array(
            [
                -1 if column in lost else places.get(name, -1)
                for column, name in enumerate(series.key.names)
            ]
        )
        lines, columns = np.nonzero(present & (table >= 0))
        none = np.full((rows, width), np.nan)
        values = [
            tables[stat][1] if stat in tables and len(tables[stat][1]) == rows else none
            for stat in STATS
        ]
        stacked = np.stack([one[lines, columns] for one in values], axis=1)
        rank = np.full(len(lines), series.rank if ranked else 0)
        parts.append((steps[lines], rank, table[columns], stacked.astype(np.float64)))
    if not any(len(part[0]) for part in parts):
        return None
    step, rank, name, values = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.lexsort((name, rank, step))
    step, rank, name, values = step[order], rank[order], name[order], values[order]
    begins = np.ones(len(step), bool)
    begins[1:] = (np.diff(step) != 0) | (np.diff(rank) != 0) | (np.diff(name) != 0)
    here = np.arange(len(step))
    row = here - np.maximum.accumulate(np.where(begins, here, 0))
    chains = tuple(
        tuple(names[one] for one in group["l2"].key.names if one in names) for group in groups
    )
    return Cells(tuple(names.values()), chains, step, rank, name, row, values)


def origin(reading: Reading) -> str:
    """Return the class of the model of a run."""
    return str(section(reading.meta, "model").get("origin", ""))
