"""A run, or several, as one page of HTML that needs no other file. Its scripts write what is in it as text, not markup."""

import json
import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gradsurgeon.common.events import Event
from gradsurgeon.errors import RecordError
from gradsurgeon.records.store.files import check_replaceable, replacing
from gradsurgeon.records.store.layout import json_number, section
from gradsurgeon.records.store.run import StoredRun, open_run
from gradsurgeon.report.callouts import nouns
from gradsurgeon.report.history import Grid, grid_of
from gradsurgeon.report.losses import LossSeries, loss_tables
from gradsurgeon.report.norms import NormTable, labels, ranked, urgent_table
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import (
    GRADIENT,
    LOSS_STATS,
    EventGroup,
    captured_table,
    rule_table,
    shown_groups,
)
from gradsurgeon.report.sheets import NO_NORM
from gradsurgeon.report.sources import summary

# What every page begins with: nothing else is written over.
BEGINNING = "<!doctype html>\n<!-- gradsurgeon report -->"
# Cells of the map that stand for no norm.
ABSENT, ZERO, NONFINITE = 0, 1, 0xFFFF
_MOST_COLUMNS, _LEAST_COLUMNS, _MOST_CELLS = 1500, 200, 750_000
_MOST_ROWS, _MOST_MARKS = 10, 600
_MOST_POINTS = 1500
# Of several losses: fewer points than pixels, and enough to see since when.
_CURVES, _POINTS = 20, 500
_STYLES = ("uplot.min.css", "page.css")
_SCRIPTS = ("uplot.min.js", "shared.js", "charts.js", "map.js", "sections.js", "page.js")


def write_page(
    runs: Sequence[Path], place: Path, *, reload_seconds: float | None = None
) -> list[str]:
    """Write the page of all runs that can be read, and return why others are not on it. No reader sees a part of it.

    A `RecordError` says that no run can be read, or that the file is no page of ours, and stays. After `reload_seconds`
    the page shows itself anew in a browser.
    """
    mark = BEGINNING.encode()
    check_replaceable(place, "page of `report`", mark)
    readable: list[dict[str, Any]] = []
    problems: list[str] = []
    for path in runs:
        try:
            with open_run(path) as run:
                readable.append(page_data(run))
        except RecordError as error:
            problems.append(str(error))
    if not readable:
        raise RecordError("\n".join(problems))
    with replacing(place) as out:
        out.write(web_page(readable, problems, reload_seconds))
    return problems


def web_page(
    runs: Sequence[dict[str, Any]],
    problems: Sequence[str] = (),
    reload_seconds: float | None = None,
) -> str:
    """Return the page of one or several runs, given what `page_data` has returned of each."""
    reload = reload_seconds or 0
    data = {"runs": list(runs), "problems": list(problems), "reload": reload}
    return Template(_assets("page.html")).substitute(
        styles=_assets(*_STYLES),
        scripts=_assets(*_SCRIPTS),
        # No text of a run ends the element that it stands in.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _assets(*names: str) -> str:
    folder = resources.files(__package__) / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def page_data(run: StoredRun) -> dict[str, Any]:
    report = summary(run)
    rules = section(run.meta, "rules")
    ended = None
    if report.ended is not None:
        ended = {**report.ended._asdict(), "level": report.ended.level}
    return {
        "title": report.title,
        "folder": str(run.path),
        "facts": list(_facts(run, report)),
        "notes": [*report.notes, *filter(None, [report.frozen_note])],
        "ended": ended,
        # Then the shares in the table of rules are of what rules would have changed.
        "observed": report.observed,
        "span": list(report.steps or ()),
        "callouts": list(report.remarks),
        "kinds": [_kind(report, table) for table in report.norms],
        "nothing": report.norms_title,
        "losses": [line(one.name, one.steps, one.values) for one in report.tagged],
        "captures": [captured_table(captured).plain() for captured in report.captured],
        "versus": [
            {"title": curves[0].stat, "table": table.plain(), "lines": _loss_lines(curves)}
            for table, curves in loss_tables(report.losses, observed=report.observed)
            if curves[0].stat in LOSS_STATS
        ],
        "rules": rule_table(report.rules, report.statuses, report.events).plain(),
        "files": [
            {"file": entry.get("file", "?"), "text": entry.get("text", "")}
            for entry in rules.get("files") or [rules]
        ],
        **_events(report.events),
    }


def _facts(run: StoredRun, report: Report) -> Iterator[tuple[str, str]]:
    if report.steps is not None:
        yield "steps", f"{report.steps[0]:,} to {report.steps[1]:,}"
    if report.ended is not None and len(report.ended.ranks) > 1:
        yield "ranks", str(len(report.ended.ranks))
    for word, key in (("began", "created"), ("torch", "torch"), ("gradsurgeon", "gradsurgeon")):
        if key in run.meta:
            yield word, str(run.meta[key])


def _kind(report: Report, table: NormTable) -> dict[str, Any]:
    """Return the section on one kind of tensors: ranking, whole norm and map, each with a scale of its own."""
    shown = ranked(table.tracks)[:_MOST_ROWS]
    urgent = urgent_table(report.history, table, _MOST_ROWS)
    wholes = report.history.gradients if table.kind == GRADIENT else []
    texts = labels(wholes, len(report.params))
    most = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, _MOST_CELLS // max(1, len(table.tracks))))
    return {
        "kind": table.kind,
        "noun": nouns(table.kind),
        # The map shows all tensors: none is left out.
        "notes": [text for text in urgent.notes if not text.startswith("and ")],
        "table": urgent.plain(),
        "urgent": [track.name for track in shown],
        "wholes": [
            line(text, one.steps, one.norms) for text, one in zip(texts, wholes, strict=True)
        ],
        "map": {"names": [one.name for one in table.tracks], **_map(grid_of(table.tracks, most))},
    }


def _map(grid: Grid) -> dict[str, Any]:
    raw = codes(grid).astype("<u2").tobytes()
    # High bytes hardly change from cell to cell: apart from the low ones they are packed to next to nothing.
    packed = zlib.compress(raw[1::2] + raw[::2])
    cells = b64encode(packed).decode("ascii")
    return {"firsts": grid.firsts.tolist(), "lasts": grid.lasts.tolist(), "cells": cells}


def codes(grid: Grid) -> Any:
    """Return a cell for each norm: 1 more than the upper half of its bits as float32, of which two digits are right."""
    bits = grid.norms.astype(np.float32).view(np.uint32) >> 16
    cells = np.where(np.isfinite(grid.norms), ZERO + bits, NONFINITE)
    return np.where(grid.norms == NO_NORM, ABSENT, cells)


def _events(events: Sequence[Event]) -> dict[str, Any]:
    first, left_out, last = shown_groups(events)
    marks, half = sorted({(event.step, event.kind) for event in events}), _MOST_MARKS // 2
    return {
        "events": [_event(group) for group in (*first, *last)],
        "left_out": left_out,
        # The beginning tells what went wrong first, the end what stopped the run.
        "marks": marks if len(marks) <= _MOST_MARKS else [*marks[:half], *marks[-half:]],
    }


def _event(group: EventGroup) -> dict[str, Any]:
    event = group.first
    where = (group.repeated or f"step {event.step}", group.on_ranks)
    return {
        **{field: getattr(event, field) for field in ("kind", "rule", "name", "message")},
        "where": ", ".join(filter(None, where)),
    }


def line(label: str, steps: ArrayLike, values: ArrayLike, every: int = 1) -> dict[str, Any]:
    """Return a curve as it travels in the page, the worst of every few values if there are many.

    Each value is the largest that is known of `every` steps.
    """
    steps, floats = np.asarray(steps, np.int64), np.asarray(values, float)
    # The worst is the first that is not finite, or else the largest.
    badness = np.where(np.isfinite(floats), floats, np.inf)
    # Several records of one step make one point.
    _, starts = np.unique(steps, return_index=True)
    ends = [*starts[:: max(1, -(-len(starts) // _MOST_POINTS))].tolist(), len(steps)]
    worst = [start + int(np.argmax(badness[start:end])) for start, end in pairwise(ends)]
    return {
        "label": label,
        "steps": steps[worst].tolist(),
        "values": [json_number(float(f"{value:.6g}")) for value in floats[worst]],
        "every": every,
    }


def _loss_lines(curves: Sequence[LossSeries]) -> list[dict[str, Any]]:
    """Return curves as they travel in the page; of a long curve one point in a few."""
    lines = []
    for curve in curves[:_CURVES]:
        steps, places = np.unique(curve.steps, return_inverse=True)
        # There may be several calls in a step, which count as one.
        means = np.bincount(places, curve.values) / np.bincount(places)
        every = -(-len(steps) // _POINTS)
        lines.append(line(curve.name, steps[::every], means[::every], every))
    return lines
