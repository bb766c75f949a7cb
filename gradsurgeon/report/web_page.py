"""A run, or several, as one page of HTML that needs nothing else: no server, no network, no other file.

Everything the page shows travels in it as JSON, which its scripts write as text: names and messages from
a run are never markup.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from string import Template
from typing import Any

from gradsurgeon.events import Event
from gradsurgeon.report.heat_map import (
    ABSENT,
    FIRST,
    LOWEST,
    NONFINITE,
    STEP,
    ZERO,
    HeatMap,
    heat_map,
)
from gradsurgeon.report.loss_charts import combined_data, compared_data
from gradsurgeon.report.measurements import STAT
from gradsurgeon.report.norms import NormRow, NormTable, norm_table, noun_of, worst_rows
from gradsurgeon.report.page import Report
from gradsurgeon.report.page_values import line_data, number
from gradsurgeon.report.rules_and_events import rule_rows
from gradsurgeon.report.sources import from_run
from gradsurgeon.report.whole_norm import Line, WholeNorm, curve, whole_norms
from gradsurgeon.store.captures import captures
from gradsurgeon.store.layout import section
from gradsurgeon.store.rank_file import StoredSeries
from gradsurgeon.store.run import Run

# What every page begins with: nothing else is written over.
BEGINNING = "<!doctype html>\n<!-- gradsurgeon report -->"
_WORST = 10
# The beginning tells what went wrong first, the end what stopped the run.
_MOST_EVENTS = 600
_MOST_LOSSES = 8
# A word of its own, be it by underscores, dots or capitals: `val_loss`, `lossKL`, `trainLoss`, but no `gloss`.
_LOSS = re.compile(
    r"((?<![A-Za-z])|(?<=[A-Z]))loss(es)?(?![a-z])|(?<![A-Z])Loss(es)?(?![a-z])|(?<![A-Za-z])LOSS(ES)?(?![A-Za-z])"
)
# Of a loss, which is one number, they are all the same; with its sign is better than without.
_STATS = ("mean", "min", "max", "l2", "l1", "linf")
_STYLES = ("uplot.min.css", "page.css")
_SCRIPTS = (
    "uplot.min.js",
    "shared.js",
    "charts.js",
    "name_tree.js",
    "heat_map.js",
    "density.js",
    "losses.js",
    "captures.js",
    "live.js",
    "page.js",
)


def web_page(
    runs: Sequence[Run | dict[str, Any]],
    problems: Sequence[str] = (),
    reload_seconds: float | None = None,
) -> str:
    """Return the page of some runs, one beside the other.

    Args:
        runs: open runs, or what `page_data` has returned of them.
        problems: why other runs are not among them, a text each.
        reload_seconds: after so many seconds the page shows itself anew; ``None`` for never.

    Raises:
        RecordError: a file of a run is damaged.
    """
    data: dict[str, Any] = {
        "cell": {
            "lowest": LOWEST,
            "step": STEP,
            "absent": ABSENT,
            "zero": ZERO,
            "first": FIRST,
            "nonfinite": NONFINITE,
        },
        "runs": [run if isinstance(run, dict) else page_data(run) for run in runs],
        "problems": list(problems),
    }
    if reload_seconds is not None:
        data["reload"] = reload_seconds
    template = Template(_asset("page.html"))
    return template.substitute(
        styles="\n".join(map(_asset, _STYLES)),
        scripts="\n".join(map(_asset, _SCRIPTS)),
        # No text of a run ends the element that it stands in.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def page_data(run: Run) -> dict[str, Any]:
    """Return what the page shows of a run, in values that JSON has.

    Raises:
        RecordError: a file of the run is damaged.
    """
    report = from_run(run)
    table = norm_table(report.measurements, report.params, report.rules, report.statuses)
    rows = table.rows
    series = _shown(run, rows)
    norms = heat_map([row.name for row in rows], series)
    wholes = whole_norms(norms, series, report.params)
    of_losses = report.of_losses()
    return {
        "title": _title(run, report),
        "folder": str(run.path),
        "facts": list(_facts(run, report)),
        "notes": list(report.notes),
        # In which the shares of what rules changed are of what they would have changed.
        "observed": report.observed,
        "noun": noun_of(rows, report.params),
        "norms": table.title
        + (f"; recorded as well, not shown: {table.others}" if table.others else ""),
        "callouts": list(table.remarks),
        "worst": [_summary(row, table) for row in worst_rows(rows, _WORST)],
        "losses": [line_data(line) for line in _losses(run)],
        "totals": [
            line_data(line)
            for line in (*(one.line for one in wholes), *_of_other_ranks(run, wholes))
        ],
        "map": _map(norms),
        "captures": [one.model_dump(exclude_none=True) for one in captures(run)[0]],
        "conflicts": [compared_data(one) for one in of_losses.compared],
        "combined": [combined_data(one, observed=report.observed) for one in of_losses.combined],
        "rules": list(rule_rows(report.rules, report.statuses, report.events)),
        "files": _rule_files(run),
        **_events(report.events),
    }


def _title(run: Run, report: Report) -> str:
    """Return the title without the folder of the rule file, whose path stands at its text."""
    folder, _, _ = str(section(run.meta, "rules").get("file", "")).rpartition("/")
    return report.title.removeprefix(f"{folder}/") if folder else report.title


def _shown(run: Run, rows: Sequence[NormRow]) -> dict[StoredSeries, list[str]]:
    """Return the series that hold what is shown of each tensor, with the tensors."""
    shown: dict[StoredSeries, list[str]] = {}
    for row in rows:
        for series in run.series(row.name, STAT, row.rule):
            if series.key.point == row.point:
                shown.setdefault(series, []).append(row.name)
    return shown


def _facts(run: Run, report: Report) -> Iterator[tuple[str, str]]:
    span = report.measurements.span()
    if span is not None:
        yield "steps", f"{span[0]:,} to {span[1]:,}"
    states = run.states
    yield "ranks", ", ".join(f"rank {rank}: {state}" for rank, state in states.items())
    for key, word in (("created", "began"), ("torch", "torch"), ("gradsurgeon", "gradsurgeon")):
        if key in run.meta:
            yield word, str(run.meta[key])


def _summary(row: NormRow, table: NormTable) -> dict[str, Any]:
    history = row.history
    numbers = ("first", "median", "largest", "last")
    return {
        "name": row.name,
        # Norms of gradients and of outputs, say, are not alike: each is told by its source.
        "source": f"{row.rule} at {row.point}" if table.several else "",
        **{key: number(getattr(history, key)) for key in numbers},
        "nonfinite": history.nonfinite,
        "nonfinite_step": history.nonfinite_step,
        "spike": None
        if history.spike is None
        else {
            "step": history.spike.step,
            "value": number(history.spike.value),
            "times": number(history.spike.times),
        },
    }


def _losses(run: Run) -> Iterator[Line]:
    """Yield what was recorded of tensors that the script has tagged as losses, of each rank that has them."""
    found: dict[tuple[str, int], StoredSeries] = {}
    for series in sorted(run, key=lambda one: (_preference(one.key.stat), one.rank)):
        for name in series.key.names:
            if name not in run.params and _LOSS.search(name):
                found.setdefault((name, series.rank), series)
    several = len({rank for _, rank in found}) > 1
    # First those of the lowest rank.
    for (name, rank), series in sorted(found.items(), key=lambda pair: pair[0][1])[:_MOST_LOSSES]:
        yield curve(f"{name}, rank {rank}" if several else name, series, name)


def _preference(stat: str) -> int:
    return [*_STATS, stat].index(stat)


def _of_other_ranks(run: Run, wholes: Sequence[WholeNorm]) -> Iterator[Line]:
    """Yield the whole norms of ranks whose gradients differ from those of the lowest one."""
    known, drawn = set(run.params), {(one.names, one.sources): one.line for one in wholes}
    sources = {source for one in wholes for source in one.sources}
    for rank in run.ranks[1:]:
        series: dict[StoredSeries, Sequence[str]] = {
            one: [name for name in one.key.names if name in known]
            for one in run
            if (one.rank, one.key.stat) == (rank, STAT) and (one.key.rule, one.key.point) in sources
        }
        names = [name for named in series.values() for name in named]
        for whole in whole_norms(heat_map(list(dict.fromkeys(names)), series), series, known):
            line = drawn.get((whole.names, whole.sources))
            if line is None or not _same(line, whole.line):
                label = line.label if line is not None else whole.line.label
                yield whole.line._replace(label=f"{label}, rank {rank}")


def _same(one: Line, other: Line) -> bool:
    """Tell whether two curves are equal; what is NaN in both is."""
    return one.steps == other.steps and all(
        a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))
        for a, b in zip(one.values, other.values, strict=True)
    )


def _map(norms: HeatMap) -> dict[str, Any]:
    raw = norms.cells.tobytes()
    # High bytes hardly change from cell to cell: apart from the low ones they are packed to next to nothing.
    packed = zlib.compress(raw[1::2] + raw[::2])
    return {
        "names": norms.names,
        "firsts": norms.firsts,
        "lasts": norms.lasts,
        "cells": b64encode(packed).decode("ascii"),
    }


def _rule_files(run: Run) -> list[dict[str, str]]:
    rules = section(run.meta, "rules")
    files = rules.get("files")
    entries = files if isinstance(files, list) and files else [rules]
    return [
        {"file": str(entry.get("file", "?")), "text": str(entry.get("text", ""))}
        for entry in entries
        if isinstance(entry, dict)
    ]


def _events(events: Sequence[Event]) -> dict[str, Any]:
    half = _MOST_EVENTS // 2
    shown: Iterable[Event] = events
    if len(events) > _MOST_EVENTS:
        shown = (*events[:half], *events[-half:])
    fields = ("kind", "rule", "step", "rank", "name", "message")
    return {
        "events": [{field: getattr(event, field) for field in fields} for event in shown],
        "left_out": max(0, len(events) - _MOST_EVENTS),
    }
