"""The recorded norms of a run, as rules are tried on them. Needs numpy."""

from __future__ import annotations

import math
import os
import zlib
from base64 import b64decode, b64encode
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator

from gradsurgeon.errors import RecordError, shorten_names
from gradsurgeon.language.planning import Manifest, manifest_file
from gradsurgeon.records.store.layout import RUN_FILE, runs_inside, section
from gradsurgeon.records.store.memory import LOSS
from gradsurgeon.records.store.recorded import Recorded, of_lowest_ranks
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.tables import by_statistic, together

# The statistics of a gradient that tell what a rule would have done.
STATS = ("l2", "linf")
# The point of a trap, which looks after backward and decides at the update.
DECISION = "decision"
_INSIDE = "{name} is of one model, and has runs of others inside: {inside}"
# Far more than an export of norms holds: no file makes more memory of one array.
_MOST_BYTES = 50_000_000


def _packed(array: NDArray[Any]) -> str:
    """Return an array as a text of JSON."""
    file = BytesIO()
    np.save(file, array)
    return b64encode(zlib.compress(file.getvalue(), 9)).decode()


def _unpacked(text: str) -> NDArray[Any]:
    raw = zlib.decompressobj().decompress(b64decode(text), _MOST_BYTES)
    array: NDArray[Any] = np.load(BytesIO(raw))
    if array.dtype.kind not in "bif":
        raise ValueError(text[:20])
    return array


Array = Annotated[NDArray[Any], PlainValidator(_unpacked), PlainSerializer(_packed)]
_Manifest = Annotated[
    Manifest,
    PlainValidator(partial(manifest_file.from_dict, file="the export of norms")),
    PlainSerializer(manifest_file.to_dict),
]


@dataclass(frozen=True, eq=False)
class RecordedTable:
    """The rows of gradients, or of losses, that share a counter of updates.

    Attributes:
        rule: the rule that recorded them.
        point: the moment at which they were measured, or `LOSS`.
        names: the names of the columns.
        steps: the update of each row, int64 ``[n]``.
        weights: the number of rows that each stands for, int64 ``[n]``.
        present: which gradients were there, ``[n, names]``.
        stats: each statistic, float32 ``[n, names]``; losses are called ``l2``, as the norms that rules judge.
        is_from_start: whether the first update of the run was recorded.
    """

    rule: str
    point: str
    names: tuple[str, ...]
    steps: Array
    weights: Array
    present: Array
    stats: dict[str, Array]
    is_from_start: bool = True

    def __post_init__(self) -> None:
        shapes = {array.shape for array in (self.present, *self.stats.values())}
        if shapes != {(len(self.steps), len(self.names))} or len(self.weights) != len(self.steps):
            raise ValueError("a part is gone")

    def rows(self, rows: NDArray[Any]) -> RecordedTable:
        """Return some rows."""
        return replace(
            self,
            steps=self.steps[rows],
            weights=self.weights[rows],
            present=self.present[rows],
            stats={stat: values[rows] for stat, values in self.stats.items()},
        )

    def without_overflows(self, skipped: Sequence[int]) -> RecordedTable:
        """Leave out updates that a scaler skipped, which rules do not see."""
        is_finite = np.isfinite(list(self.stats.values())).all(axis=0)
        overflowed = np.any(self.present & ~is_finite, axis=1)
        return self.rows(~(overflowed & np.isin(self.steps, skipped)))

    def updates(self, rows: Array) -> int:
        """Return the number of updates that some rows are of. Each pass of an update may have a row."""
        is_first = np.diff(self.steps[rows], prepend=-1) != 0
        return int(self.weights[rows][is_first].sum())


@dataclass(frozen=True)
class RunNorms:
    """What a run tells of rules that it did not have. An export of norms has this form as JSON.

    Attributes:
        name: the run.
        manifest: the names of its model.
        tables: the records; each name once for each point.
        ranks: the number of ranks.
        edited_at_backward: a rule that changed what backward passes contribute; empty if there is none.
        edited_first: a rule that changed gradients at the update before they were recorded there; empty if there is none.
        changed_by_script: whether the script changed gradients between backward and update, ``None`` if that is not known.
        is_rounded: whether its rows stand for several.
    """

    name: str
    manifest: _Manifest
    tables: tuple[RecordedTable, ...]
    ranks: int = 1
    edited_at_backward: str = ""
    edited_first: str = ""
    changed_by_script: bool | None = None
    is_rounded: bool = False

    @property
    def at_update(self) -> bool:
        """Whether gradients were recorded right before the update."""
        return any(table.point == "step" for table in self.tables)

    def at(self, point: str) -> list[RecordedTable]:
        """Return the tables of a point. If none are of the update, those after backward stand for it, and the other way round for a trap."""
        points = {table.point for table in self.tables}
        # A trap decides at the update, and the script may have repaired a gradient before.
        if point == DECISION and (self.changed_by_script or "accumulated" not in points):
            point = "step"
        if point == DECISION or (point == "step" and point not in points):
            point = "accumulated"
        return [table for table in self.tables if table.point == point]


def read(path: str | os.PathLike[str]) -> RunNorms:
    """Return the norms of a run directory.

    Raises:
        RecordError: the run cannot be read, or has no shapes of parameters.
        ManifestError: what the run says of its model is damaged.
    """
    name = os.fspath(path)
    recorded = open_run(path).recorded()
    edits: dict[str, str] = {}
    recorders = set()
    edited_first = ""
    meta = recorded.meta
    # In the order of the file, in which rules of one point act.
    for rule in section(meta, "plan").get("rules", ()):
        role = section(meta, "roles").get(rule["id"], {})
        if not rule["params"] or rule["tensor"] != "grad":
            continue
        if role.get("role") in ("edit", "freeze") and meta.get("mode") != "observe":
            edits.setdefault(rule["point"], rule["id"])
        if role.get("role") == "observe" and rule["point"] == "step" and "step" in edits:
            edited_first = edits["step"]
        elif role.get("per") != "rule":
            recorders.add(rule["id"])
    tables = [table for table in _tables(recorded, recorders) if len(table.steps)]
    model = section(meta, "model")
    if "version" not in model:
        raise RecordError(
            f"{name}: an earlier version recorded this run, without the shapes of the parameters; record it again"
        )
    model.pop("title", None)
    manifest = manifest_file.from_dict(model, f"{name}/{RUN_FILE}")
    inside = runs_inside(Path(path))
    if inside:
        note = _INSIDE.format(name=name, inside=shorten_names(list(map(str, inside))))
        manifest = replace(manifest, notes=(note,))
    return RunNorms(
        name=name,
        manifest=manifest,
        tables=tuple(_each_once(tables)),
        ranks=meta.get("ranks", 1),
        edited_at_backward=edits.get("backward", ""),
        edited_first=edited_first,
        changed_by_script=recorded.changed_by_script,
    )


def _tables(recorded: Recorded, recorders: Container[str]) -> Iterator[RecordedTable]:
    """Yield what rules recorded of gradients, and losses: for each rule, point and counter with all statistics."""
    parts = []
    for series, repeated in of_lowest_ranks(recorded.series):
        is_norm = series.key.stat in STATS and series.key.rule in recorders
        # A column that a lower rank has is a replica, or a part of a whole that all of them recorded.
        if not repeated and len(series) and (is_norm or series.key.stat == LOSS):
            parts.append(series)
    skipped = [event.step for event in recorded.events if event.kind == "scaler-skip"]
    for (_, rule_id, point, names), by_stat in by_statistic(parts).items():
        steps, stats, present = together(by_stat)
        where = point
        if LOSS in stats:
            where = LOSS
            stats = {"l2": stats[LOSS]}
        is_from_start = int(steps[0]) <= (recorded.meta.get("start_step") or 0)
        weights = np.ones_like(steps)
        table = RecordedTable(rule_id, where, names, steps, weights, present, stats, is_from_start)
        # The update of the last passes may never have come.
        table = table.rows(steps < recorded.pending.get(names[0], math.inf))
        yield table if point == "backward" else table.without_overflows(skipped)


def _each_once(tables: Sequence[RecordedTable]) -> Iterator[RecordedTable]:
    """Yield, of a point, the tables with most names, and further ones that have none of the names that another rule recorded."""
    owners: dict[tuple[str, str], str] = {}
    for table in sorted(tables, key=lambda table: -len(table.names)):
        own = dict.fromkeys([(table.point, name) for name in table.names], table.rule)
        if {owners.get(key, table.rule) for key in own} == {table.rule}:
            owners |= own
            yield table
