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
KEY_FIELDS = [(key, np.int64) for key in KEYS]
_CELL = np.dtype([*KEY_FIELDS, ("values", np.float64, len(STATS))])
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
        match = re.match(r"(input|output)\b", self.tensor)
        if match is None:
            return self.tensor
        if self.tensor.endswith(".grad"):
            return f"{match[0]}.grad"
        return match[0]

    @property
    def of_modules(self) -> bool:
        return self.base.startswith(("input", "output"))

    @property
    def phase(self) -> str:
        if not self.of_modules:
            return "gradient" if self.tensor == "grad" else "update"
        return "backward" if self.base.endswith(".grad") else "forward"

    @property
    def is_final(self) -> bool:
        """Return whether it is the gradient that the optimizer gets, after the clip of the script."""
        return self == ("grad", "step")

    def at(self, path: str) -> "Kind":
        """Return the kind of the tensors at a path inside what a module takes or returns, such as `input[0]`."""
        if self.tensor.endswith(".grad"):
            return Kind(f"{self.tensor.removesuffix('.grad')}{path}.grad", self.point)
        return Kind(f"{self.tensor}{path}", self.point)

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
    groups = _groups(run)
    lowest = dict(of_lowest_ranks(run))
    bound: dict[int, set[int]] = {}
    parts = [np.empty(0, _CELL)]
    chains: list[list[str]] = []
    for rule in run.rules:
        kind = Kind(str(rule.get("tensor") or "grad"), str(rule.get("point") or ""))
        number = words.of_kind(kind)
        groups_of_rule = groups.get(rule["id"])
        if groups_of_rule is None or number in bound:
            continue
        names = _compared(run.names_of(rule["id"]), rename)
        bound[number] = set(map(words.of_name, names.values()))
        for group in groups_of_rule:
            first = group["l2"]
            columns = range(len(first.key.names))
            rank = first.rank
            repeated: Collection[int] = ()
            if not kind.of_modules:  # each rank has the same gradient, or a part of it
                rank = 0
                repeated = lowest.get(first, columns)
            chain: dict[str, None] = {}
            kinds = np.zeros(len(columns), np.int64)
            numbers = np.full(len(columns), -1)
            for column in columns:
                name = first.key.names[column]
                owner = _owner(name, names) if kind.of_modules else name
                if owner not in names or column in repeated:
                    continue
                inner_kind = words.of_kind(kind.at(name[len(owner) :]))
                owner_number = words.of_name(names[owner])
                kinds[column] = inner_kind
                numbers[column] = owner_number
                bound.setdefault(inner_kind, set()).add(owner_number)
                chain[names[owner]] = None
            if kind.base == "input":
                chains.append(list(chain))
            parts.append(_cells(group, kinds, numbers, rank))
    cells = np.concatenate(parts)
    if not len(cells):
        raise RecordError(
            f"{printable(str(run.path))}: has no fingerprints to compare, which are `l2` and `projection` of one rule; "
            "record it with the rules `gradsurgeon:fingerprint@1`"
        )
    _sort(cells)
    return Reading(str(run.path), run.meta, cells, bound, chains, _dtypes(run, rename))


def _groups(run: StoredRun) -> dict[str, list[dict[str, StoredSeries]]]:
    """Return the series of fingerprints by statistic, for each rule."""
    groups: dict[tuple[Any, ...], dict[str, StoredSeries]] = {}
    for series in run:
        key = series.key
        group = groups.setdefault((key.rule, series.rank, key.point, key.names), {})
        group[key.stat] = series
    by_rule: dict[str, list[dict[str, StoredSeries]]] = {}
    for (rule, *_), group in groups.items():
        if group.keys() >= _NEEDED:
            by_rule.setdefault(rule, []).append(group)
    return by_rule


def _sort(cells: Any) -> None:
    """Sort cells by `KEYS`, and number the rows of one tensor and step."""
    order = np.lexsort([cells["name"], cells["rank"], cells["kind"], cells["step"]])
    cells[:] = cells[order]
    places = np.arange(len(cells))
    first = np.where(starts(cells), places, 0)
    cells["row"] = places - np.maximum.accumulate(first)


def _owner(name: str, modules: Mapping[str, str]) -> str:
    """Return the module of a tensor: a path behind the name of a module tells one of several tensors."""
    owner = name
    while owner and owner not in modules:
        end = max(owner.rfind("."), owner.rfind("["), 0)
        owner = owner[:end]
    return owner or name


def _dtypes(run: StoredRun, rename: Callable[[str], str]) -> dict[str, str]:
    """Return the dtypes of parameters by the names that are compared."""
    dtypes = {}
    for param in section(run.meta, "model").get("params", ()):
        if "dtype" not in param:
            continue
        dtype = str(param["dtype"])
        for name in (param["name"], *param.get("aliases", ())):
            dtypes[rename(stripped(name))] = dtype
    return dtypes


def names_in(runs: Iterable[StoredRun]) -> set[str]:
    """Return the names that the rules of some runs are bound to, without the segments that wrappers add."""
    names: set[str] = set()
    for run in runs:
        for rule in run.rules:
            names.update(map(stripped, run.names_of(rule["id"])))
    return names


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
    if document.problems:
        raise RuleFileError(document.problems)
    names = document.data
    if not isinstance(names, Mapping) or not names:
        _refuse(document.place(()), "the file has no names", _HINT)
    for name, new_name in names.items():
        if not isinstance(new_name, str) or not new_name:
            _refuse(document.place((name,)), f"the new name of `{name}` is no text", _HINT)
        place = document.key_place((name,))
        _check_known(name, old, "reference", place)
        _check_known(new_name, new, "run", place)

    def rename(name: str) -> str:
        prefix = max((known for known in names if is_inside(name, known)), key=len, default=None)
        if prefix is None:
            return name
        return f"{names[prefix]}{name.removeprefix(prefix)}"

    return rename


def _check_known(name: str, known: Collection[str], which: str, place: Place) -> None:
    """Refuse a name that no name of a run is, or begins with."""
    if any(is_inside(longer, name) for longer in known):
        return
    parents = [longer.rpartition(".")[0] for longer in known]
    hint = did_you_mean(name, {*known, *parents})
    _refuse(place, f"the {which} has no name that is `{name}`, or begins with `{name}.`", hint)


def _refuse(place: Place, message: str, hint: str) -> NoReturn:
    raise RuleFileError([Problem(place, "bad-map", message, hint)])


def starts(cells: Any) -> Flags:
    """Tell which cells are the first of a tensor and step."""
    is_first = np.zeros(len(cells), bool)
    is_first[:1] = True
    for key in KEYS[:-1]:
        is_first[1:] |= np.diff(cells[key]) != 0
    return is_first


def _compared(names: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Return the name under which each tensor is compared; a wrapper stands for the module inside it."""
    compared: dict[str, str] = {}
    used = {""}
    for name in names:
        new_name = rename(stripped(name))
        if new_name not in used:
            used.add(new_name)
            compared[name] = new_name
    return compared


def _cells(group: Mapping[str, StoredSeries], kinds: Ints, names: Ints, rank: int) -> Any:
    """Return the rows of a group, given kind and name of each column, -1 for columns that are not compared."""
    # A run that is still being written may have one more row of one statistic.
    rows = min(len(group[stat]) for stat in _NEEDED)
    if not rows:
        return np.empty(0, _CELL)
    read = {}
    for stat, series in group.items():
        read[stat] = arrays(list(series.stored(0, rows)), len(names))
    steps, _, present = read["l2"]
    lines, columns = np.nonzero(present & (names >= 0))
    cells = np.zeros(len(lines), _CELL)
    cells["step"] = steps[lines]
    cells["kind"] = kinds[columns]
    cells["rank"] = rank
    cells["name"] = names[columns]
    values = cells["values"]
    values[:] = np.nan
    for place, stat in enumerate(STATS):
        if stat not in read:
            continue
        of_steps, numbers, _ = read[stat]
        if len(of_steps) == rows:
            values[:, place] = numbers[lines, columns]
    return cells
