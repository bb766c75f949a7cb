"""A run, or several, as one page of HTML that needs nothing else: no server, no network, no other file.

Everything the page shows travels in it as JSON, which its scripts write as text: names and messages from
a run are never markup.
"""

from __future__ import annotations

import json
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
    Line,
    curve,
    heat_map,
)
from gradsurgeon.report.measurements import STAT
from gradsurgeon.report.norms import NormRow, callouts, norm_rows, noun_of, worst_rows
from gradsurgeon.report.page import Report
from gradsurgeon.report.rules_and_events import rule_rows
from gradsurgeon.report.sources import from_run
from gradsurgeon.store.json_text import json_number
from gradsurgeon.store.layout import section
from gradsurgeon.store.rank_file import StoredSeries
from gradsurgeon.store.run import Run

# What every page begins with: nothing else is written over.
BEGINNING = "<!doctype html>\n<!-- gradsurgeon report -->"
_WORST = 10
# The beginning tells what went wrong first, the end what stopped the run.
_MOST_EVENTS = 600
_MOST_LOSSES = 8
_LOSS = re.compile(r"(^|[^a-z])(loss|losses)([^a-z]|$)", re.IGNORECASE)
# Of a loss, which is one number, they are all the same; with its sign is better than without.
_STATS = ("mean", "min", "max", "l2", "l1", "linf")
_STYLES = ("uplot.min.css", "page.css")
_SCRIPTS = ("uplot.min.js", "charts.js", "heat_map.js", "page.js")


def web_page(runs: Sequence[Run]) -> str:
    """Return the page of some runs, one beside the other.

    Raises:
        RecordError: a file of a run is damaged.
    """
    data = {
        "cell": {
            "lowest": LOWEST,
            "step": STEP,
            "absent": ABSENT,
            "zero": ZERO,
            "first": FIRST,
            "nonfinite": NONFINITE,
        },
        "runs": [_of_run(run) for run in runs],
    }
    template = Template(_asset("page.html"))
    return template.substitute(
        styles="\n".join(map(_asset, _STYLES)),
        scripts="\n".join(map(_asset, _SCRIPTS)),
        # No text of a run ends the element that it stands in.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _of_run(run: Run) -> dict[str, Any]:
    report = from_run(run)
    rows = norm_rows(report.measurements, report.params, list(report.rules))
    noun = noun_of(rows, report.params)
    norms = heat_map([row.name for row in rows], _shown(run, rows), totals=report.params)
    return {
        "title": report.title,
        "folder": str(run.path),
        "facts": list(_facts(run, report)),
        "notes": list(report.notes),
        "noun": noun,
        "callouts": list(callouts(rows, noun)),
        "worst": [_summary(row) for row in worst_rows(rows, _WORST)],
        "losses": [_line(line) for line in _losses(run)],
        "totals": [_line(line) for line in (*norms.totals, *_of_other_ranks(run, norms))],
        "map": _map(norms),
        "rules": list(rule_rows(report.rules, report.statuses, report.events)),
        "files": _rule_files(run),
        **_events(report.events),
    }


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
    yield "ranks", ", ".join(f"{rank} {state}" for rank, state in states.items())
    for key, word in (("created", "began"), ("torch", "torch"), ("gradsurgeon", "gradsurgeon")):
        if key in run.meta:
            yield word, str(run.meta[key])


def _summary(row: NormRow) -> dict[str, Any]:
    history = row.history
    numbers = ("first", "median", "largest", "last")
    return {
        "name": row.name,
        **{key: _number(getattr(history, key)) for key in numbers},
        "nonfinite": history.nonfinite,
        "nonfinite_step": history.nonfinite_step,
        "spike": None
        if history.spike is None
        else {
            "step": history.spike.step,
            "value": _number(history.spike.value),
            "times": _number(history.spike.times),
        },
    }


def _losses(run: Run) -> Iterator[Line]:
    """Yield what was recorded of tensors that the script has tagged as losses."""
    of_name: dict[str, StoredSeries] = {}
    for series in sorted(run.lowest(), key=lambda one: _preference(one.key.stat)):
        for name in series.key.names:
            if name not in run.params and _LOSS.search(name):
                of_name.setdefault(name, series)
    for name, series in list(of_name.items())[:_MOST_LOSSES]:
        yield curve(name, series, name)


def _preference(stat: str) -> int:
    return [*_STATS, stat].index(stat)


def _of_other_ranks(run: Run, norms: HeatMap) -> Iterator[Line]:
    """Yield the whole norms of ranks whose gradients differ from those of the lowest one."""
    if not norms.totals:
        return
    ours = norms.totals[0]
    for series in run:
        named = [name for name in series.key.names if name in run.params]
        if series.rank == run.ranks[0] or series.key.stat != STAT or not named:
            continue
        for line in heat_map(named, {series: named}, totals=named).totals:
            if line.values != ours.values:
                yield line._replace(label=f"{line.label}, rank {series.rank}")


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


def _line(line: Line) -> dict[str, Any]:
    return {
        "label": line.label,
        "steps": line.steps,
        "values": [None if value is None else _number(value) for value in line.values],
        "every": line.every,
    }


def _number(value: float) -> float | str:
    # Six digits are more than anybody reads off a curve.
    return json_number(float(f"{value:.6g}"))


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
