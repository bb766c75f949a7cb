"""The fingerprints of runs, by step, kind and name. Needs numpy."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gradsurgeon.errors import Place, Problem, RecordError, RuleFileError, did_you_mean, printable
from gradsurgeon.language import source
from gradsurgeon.records.store.layout import section
from gradsurgeon.records.store.rank_file import StoredSeries
from gradsurgeon.records.store.recorded import of_lowest_ranks
from gradsurgeon.records.store.run import StoredRun
from gradsurgeon.records.store.tables import by_statistic, together
from gradsurgeon.report.comparison.order import is_inside
from gradsurgeon.report.rules_and_events import base_of

# These statistics make a fingerprint; the number of elements is welcome, not needed.
STATS = ("l2", "projection_1", "projection_2", "numel")
_NEEDED = frozenset(STATS[:3])
# The values of `STATS`, NaN where one is not known.
Numbers = Sequence[float]
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
        return base_of(self.tensor)

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


class TensorOfStep(NamedTuple):
    """One tensor of one step; a gradient that ranks share is of rank 0."""

    step: int
    kind: Kind
    rank: int
    name: str


@dataclass(frozen=True)
class Reading:
    """The fingerprints of one run.

    Each tensor has as many numbers as it was there in its step. `bound` has the names of each kind, in the order of the
    model; chains are names in the order of calls; dtypes are those of parameters, by name.
    """

    path: str
    meta: Mapping[str, Any]
    rows: Mapping[TensorOfStep, list[Numbers]]
    bound: Mapping[Kind, dict[str, None]]
    chains: list[list[str]]
    dtypes: Mapping[str, str]

    @property
    def steps(self) -> set[int]:
        return {tensor.step for tensor in self.rows}


def stripped(name: str) -> str:
    """Return a name without the segments that wrappers add.

    >>> stripped("module.h.0._orig_mod.attn.weight")
    'h.0.attn.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def read(run: StoredRun, rename: Callable[[str], str] = str) -> Reading:
    """Return the fingerprints of a run, by other names. Raises `RecordError` without any."""
    groups = _groups(run)
    lowest = dict(of_lowest_ranks(run))
    rows: defaultdict[TensorOfStep, list[Numbers]] = defaultdict(list)
    bound: dict[Kind, dict[str, None]] = {}
    chains: list[list[str]] = []
    for rule in run.rules:
        kind = Kind(str(rule.get("tensor") or "grad"), str(rule.get("point") or ""))
        if rule["id"] not in groups or kind in bound:
            continue
        names = _compared(run.names_of(rule["id"]), rename)
        bound[kind] = dict.fromkeys(names.values())
        for group in groups[rule["id"]]:
            first = group["l2"]
            rank = 0  # each rank has the same gradient, or a part of it
            repeated: Collection[int] = lowest.get(first, range(len(first.key.names)))
            if kind.of_modules:
                rank = first.rank
                repeated = ()
            columns = _columns(first.key.names, kind, names, repeated)
            chain = []
            for inner, name in columns.values():
                bound.setdefault(inner, {})[name] = None
                chain.append(name)
            if kind.base == "input":
                chains.append(list(dict.fromkeys(chain)))
            for tensor, numbers in _rows(group, columns, rank):
                rows[tensor].append(numbers)
    if not rows:
        raise RecordError(
            f"{printable(str(run.path))}: has no fingerprints to compare, which are `l2` and `projection` of one rule; "
            "record it with the rules `gradsurgeon:fingerprint@1`"
        )
    return Reading(str(run.path), run.meta, rows, bound, chains, _dtypes(run, rename))


def _columns(
    recorded: Sequence[str], kind: Kind, names: Mapping[str, str], repeated: Collection[int]
) -> dict[int, tuple[Kind, str]]:
    """Return kind and name of each column that is compared."""
    columns = {}
    for column, name in enumerate(recorded):
        owner = _owner(name, names) if kind.of_modules else name
        if owner in names and column not in repeated:
            columns[column] = kind.at(name[len(owner) :]), names[owner]
    return columns


def _groups(run: StoredRun) -> dict[str, list[dict[str, StoredSeries]]]:
    """Return the series of fingerprints by statistic, for each rule."""
    by_rule: dict[str, list[dict[str, StoredSeries]]] = defaultdict(list)
    fingerprints = [series for series in run if series.key.stat in STATS]
    for (_, rule, _, _), group in by_statistic(fingerprints).items():
        if group.keys() >= _NEEDED:
            by_rule[rule].append(group)
    return by_rule


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
        for name in (param["name"], *param.get("aliases", ())):
            dtypes[rename(stripped(name))] = str(param.get("dtype"))
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


def _compared(names: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Return the name under which each tensor is compared; a wrapper stands for the module inside it."""
    names_by_new: dict[str, str] = {}
    for name in names:
        names_by_new.setdefault(rename(stripped(name)), name)
    names_by_new.pop("", None)
    return {name: new_name for new_name, name in names_by_new.items()}


def _rows(
    group: Mapping[str, StoredSeries], columns: Mapping[int, tuple[Kind, str]], rank: int
) -> Iterator[tuple[TensorOfStep, Numbers]]:
    """Yield the numbers of some columns of a group, in the order of steps."""
    if any(len(series) == 0 for series in group.values()):
        return
    steps, values, present = together(group)
    unknown = np.full(present.shape, np.nan)
    numbers = np.stack([values.get(stat, unknown) for stat in STATS], axis=-1)
    lists = zip(steps.tolist(), numbers.tolist(), present.tolist(), strict=True)
    for step, of_columns, are_there in lists:
        for column, (kind, name) in columns.items():
            if are_there[column]:
                yield TensorOfStep(step, kind, rank, name), of_columns[column]
