"""The fingerprints of runs as arrays, by kinds and names that the runs share. Needs numpy."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gradsurgeon.errors import Place, Problem, RecordError, RuleFileError, did_you_mean, printable
from gradsurgeon.language import source
from gradsurgeon.records.store.layout import section
from gradsurgeon.records.store.rank_file import StoredSeries
from gradsurgeon.records.store.recorded import of_lowest_ranks
from gradsurgeon.records.store.run import StoredRun
from gradsurgeon.records.store.tables import arrays
from gradsurgeon.report.comparison.order import is_inside
from gradsurgeon.report.spikes import Flags, Ints

# What makes a fingerprint; the number of elements is welcome, not needed.
STATS = ("l2", "projection_1", "projection_2", "numel")
_NEEDED = frozenset(STATS[:3])
# Step, kind and name of a tensor, the rank, and the number of the row among those of the same tensor and step.
KEYS = ("step", "kind", "rank", "name", "row")
_CELL = np.dtype([*((key, np.int64) for key in KEYS), ("values", np.float64, len(STATS))])
_WORDS = {
    "output.grad": "output gradient of {}",
    "input.grad": "input gradient of {}",
    "grad": "gradient of {}",
    "value": "weight {} after the update",
}
_HINT = (
    "write one line `old: new` for each name that changed, such as `h.0.attn: blocks.0.attention`"
)
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class Kind(NamedTuple):
    """A kind of tensor, such as the output of modules, and the point at which it was measured."""

    tensor: str
    point: str

    @property
    def base(self) -> str:
        """Return `input`, `output`, `output.grad` ... without a path inside a tuple."""
        ends = re.match(r"(input|output)\b", self.tensor)
        return ends[0] + ".grad" * self.tensor.endswith(".grad") if ends else self.tensor

    @property
    def of_modules(self) -> bool:
        return self.base.startswith(("input", "output"))

    @property
    def phase(self) -> str:
        if self.of_modules:
            return "backward" if self.base.endswith(".grad") else "forward"
        return "gradient" if self.tensor == "grad" else "update"

    @property
    def is_final(self) -> bool:
        """Return whether it is the gradient that the optimizer gets, after the clip of the script."""
        return self == ("grad", "step")

    def at(self, path: str) -> "Kind":
        """Return the kind of the tensors at a path inside what a module takes or returns, such as `input[0]`."""
        grad = ".grad" * self.tensor.endswith(".grad")
        return Kind(f"{self.tensor.removesuffix('.grad')}{path}{grad}", self.point)

    def text(self, name: str) -> str:
        text = _WORDS.get(self.base, f"{self.base} of {{}}").format(name)
        return f"final {text}" if self.is_final else text


class Words:
    """The kinds and names of all runs, with a number each."""

    def __init__(self) -> None:
        self.kinds: dict[Kind, int] = {}
        self.names: dict[str, int] = {}

    def of_kind(self, kind: Kind) -> int:
        return self.kinds.setdefault(kind, len(self.kinds))

    def of_name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))


@dataclass(frozen=True)
class Reading:
    """The fingerprints of one run: cells sorted by `KEYS`, and numbers of names by kind. Chains are in the order of calls.

    Dtypes are those of parameters, by name.
    """

    path: str
    meta: Mapping[str, Any]
    cells: Any
    bound: Mapping[int, set[int]]
    chains: list[list[str]]
    dtypes: Mapping[str, str]

    @property
    def steps(self) -> Ints:
        return np.unique(self.cells["step"])


def stripped(name: str) -> str:
    """Return a name without the segments that wrappers add.

    >>> stripped("module.h.0._orig_mod.attn.weight")
    'h.0.attn.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def read(run: StoredRun, words: Words, rename: Callable[[str], str]) -> Reading:
    """Return the fingerprints of a run, by other names; `words` gets its kinds and names. Raises `RecordError` without any."""
    groups: dict[tuple[Any, ...], dict[str, StoredSeries]] = {}
    for series in run:
        key = series.key
        groups.setdefault((key.rule, series.rank, key.point, key.names), {})[key.stat] = series
    lowest = dict(of_lowest_ranks(run))
    bound: dict[int, set[int]] = {}
    parts = [np.empty(0, _CELL)]
    chains: list[list[str]] = []
    for rule in run.rules:
        kind = Kind(str(rule.get("tensor") or "grad"), str(rule.get("point") or ""))
        number = words.of_kind(kind)
        mine = [one for of, one in groups.items() if of[0] == rule["id"] and one.keys() >= _NEEDED]
        if not mine or number in bound:
            continue
        names = _compared(run.names_of(rule["id"]), rename)
        bound[number] = set(map(words.of_name, names.values()))
        for group in mine:
            first = group["l2"]
            width = len(first.key.names)
            chain: dict[str, None] = {}
            kinds = np.zeros(width, np.int64)
            numbers = np.full(width, -1)
            repeated: Collection[int] = ()
            if not kind.of_modules:  # each rank has the same gradient, or a part of it
                repeated = lowest.get(first, range(width))
            for column, name in enumerate(first.key.names):
                owner = _owner(name, names) if kind.of_modules else name
                if owner not in names or column in repeated:
                    continue
                kinds[column] = words.of_kind(kind.at(name[len(owner) :]))
                numbers[column] = words.of_name(names[owner])
                bound.setdefault(int(kinds[column]), set()).add(int(numbers[column]))
                chain[names[owner]] = None
            if kind.base == "input":
                chains.append(list(chain))
            parts.append(_cells(group, kinds, numbers, first.rank if kind.of_modules else 0))
    cells = np.concatenate(parts)
    if not len(cells):
        raise RecordError(
            f"{printable(str(run.path))}: has no fingerprints to compare, which are `l2` and `projection` of one rule; "
            "record it with the rules `gradsurgeon:fingerprint@1`"
        )
    cells = cells[np.lexsort([cells[key] for key in reversed(KEYS[:-1])])]
    here, begins = np.arange(len(cells)), starts(cells)
    cells["row"] = here - np.maximum.accumulate(np.where(begins, here, 0))
    return Reading(str(run.path), run.meta, cells, bound, chains, _dtypes(run, rename))


def _owner(name: str, modules: Mapping[str, str]) -> str:
    """Return the module of a tensor: a path behind the name of a module tells one of several tensors."""
    end = len(name)
    while end > 0 and name[:end] not in modules:
        end = max(name.rfind(".", 0, end), name.rfind("[", 0, end))
    return name[:end] if end > 0 else name


def _dtypes(run: StoredRun, rename: Callable[[str], str]) -> dict[str, str]:
    dtypes = {}
    for param in section(run.meta, "model").get("params", ()):
        if "dtype" in param:
            for name in (param["name"], *param.get("aliases", ())):
                dtypes[rename(stripped(name))] = str(param["dtype"])
    return dtypes


def names_in(runs: Iterable[StoredRun]) -> set[str]:
    """Return the names that the rules of some runs are bound to, without the segments that wrappers add."""
    names = {name for run in runs for rule in run.rules for name in run.names_of(rule["id"])}
    return set(map(stripped, names))


def renaming(
    renamed: str | os.PathLike[str] | Mapping[str, str], old: Collection[str], new: Collection[str]
) -> Callable[[str], str]:
    """Return a function that replaces the longest known prefix of a name.

    Raises `RuleFileError` if the file is no mapping of names of the reference to names of the run.
    """
    if isinstance(renamed, Mapping):
        document = source.parse(json.dumps(dict(renamed)), "<names>")
    else:
        document = source.read(renamed)
    names = document.data
    if document.problems:
        raise RuleFileError(document.problems)
    if not isinstance(names, Mapping) or not names:
        _refuse(document.place(()), "the file has no names", _HINT)
    for name, value in names.items():
        if not isinstance(value, str) or not value:
            _refuse(document.place((name,)), f"the new name of `{name}` is no text", _HINT)
        for where, known, one in (("reference", old, name), ("run", new, value)):
            if not any(is_inside(each, one) for each in known):
                hint = did_you_mean(one, {*known, *(each.rpartition(".")[0] for each in known)})
                message = f"the {where} has no name that is `{one}`, or begins with `{one}.`"
                _refuse(document.key_place((name,)), message, hint)

    def rename(name: str) -> str:
        prefix = max((one for one in names if is_inside(name, one)), key=len, default="")
        return f"{names[prefix]}{name[len(prefix) :]}" if prefix else name

    return rename


def _refuse(place: Place, message: str, hint: str) -> NoReturn:
    raise RuleFileError([Problem(place, "bad-map", message, hint)])


def starts(cells: Any) -> Flags:
    first = np.ones(len(cells), bool)
    first[1:] = np.any([np.diff(cells[key]) != 0 for key in KEYS[:-1]], axis=0)
    return first


def _compared(names: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Return the name under which each tensor is compared; a wrapper stands for the module inside it."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(rename(stripped(name)), name)
    found.pop("", None)
    return {old: new for new, old in found.items()}


def _cells(group: Mapping[str, StoredSeries], kinds: Ints, names: Ints, rank: int) -> Any:
    """Return the rows of a group, given kind and name of each column, -1 for columns that are not compared."""
    # A run that is still being written may have one more row of one statistic.
    rows = min(len(group[stat]) for stat in _NEEDED)
    if not rows:
        return np.empty(0, _CELL)
    read = {stat: arrays(list(one.stored(0, rows)), len(names)) for stat, one in group.items()}
    steps, _, present = read["l2"]
    lines, columns = np.nonzero(present & (names >= 0))
    cells = np.zeros(len(lines), _CELL)
    cells["step"] = steps[lines]
    cells["kind"] = kinds[columns]
    cells["rank"] = rank
    cells["name"] = names[columns]
    for place, stat in enumerate(STATS):
        there = stat in read and len(read[stat][0]) == rows
        cells["values"][:, place] = read[stat][1][lines, columns] if there else np.nan
    return cells
