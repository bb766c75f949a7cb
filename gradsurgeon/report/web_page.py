"""A run, or several, as one page of HTML that needs no other file. Its scripts write what is in it as text, not markup."""

import json
import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import resources
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from gradsurgeon.common._grouping import names_of
from gradsurgeon.common.events import Event
from gradsurgeon.errors import RecordError
from gradsurgeon.records.store.files import check_replaceable, replacing
from gradsurgeon.records.store.layout import section
from gradsurgeon.records.store.run import StoredRun, open_run
from gradsurgeon.report.callouts import nouns
from gradsurgeon.report.histograms import SHARES, magnitudes_of
from gradsurgeon.report.history import Grid, grid_of
from gradsurgeon.report.losses import loss_tables, thinned
from gradsurgeon.report.norms import labels, norm_table, ranked
from gradsurgeon.report.ranks import rank_lines
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import (
    COSINE,
    GRADIENT,
    LOSS_STATS,
    WHOLE,
    EventGroup,
    shown_groups,
)
from gradsurgeon.report.sheets import NO_NORM
from gradsurgeon.report.sources import summary
from gradsurgeon.report.spikes import Floats, Ints

# Every page begins so: no other file is written over.
BEGINNING = "<!doctype html>\n<!-- gradsurgeon report -->"
# Cells of the map that stand for no norm.
ABSENT = 0
ZERO = 1
NONFINITE = 0xFFFF
_MOST_COLUMNS = 1500
_LEAST_COLUMNS = 200
_MOST_CELLS = 750_000
_MOST_ROWS = 10
_MOST_MARKS = 600
_CURVES = 20
_MOST_MAGNITUDES = 60
_ABOUT = ("created", "torch", "gradsurgeon")
_STYLES = ("uplot.min.css", "page.css")
_SCRIPTS = ("uplot.min.js", "shared.js", "charts.js", "map.js", "sections.js", "page.js")


def write_page(runs: Sequence[Path], place: Path, *, reload_seconds: float = 0) -> list[str]:
    """Write the page of all runs that can be read, and return why others are not on it. No reader sees a part of it.

    A `RecordError` says that no run can be read, or that the file is no page of ours, and stays. After `reload_seconds`
    the page shows itself anew in a browser.
    """
    check_replaceable(place, "page of `report`", BEGINNING.encode())
    readable = []
    problems = []
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
    reload_seconds: float = 0,
) -> str:
    """Return the page of one or several runs, given what `page_data` has returned of each."""
    data = {"runs": runs, "problems": problems, "reload": reload_seconds}
    text = json.dumps(data, separators=(",", ":"))
    # No text of a run ends the element of the page that holds it.
    text = text.replace("<", "\\u003c")
    template = Template(_assets("page.html"))
    return template.substitute(styles=_assets(*_STYLES), scripts=_assets(*_SCRIPTS), data=text)


def _assets(*names: str) -> str:
    folder = resources.files(__package__) / "assets"
    texts = [(folder / name).read_text(encoding="utf-8") for name in names]
    return "\n".join(texts)


def page_data(run: StoredRun) -> dict[str, Any]:
    report = summary(run)
    outcome = report.outcome
    ended = None
    if report.ended is not None:
        ended = {
            "state": report.ended.state,
            "words": report.ended.words,
            "diagnosis": outcome.diagnosis,
            "trips": report.tally.trips,
            "findings": len(report.tally.findings) - report.tally.traps,
        }
    notes = [*report.notes, *rank_lines(report.progress), report.frozen_note]
    first, left_out, last = shown_groups(report.events)
    return {
        "title": report.title,
        "folder": str(run.path),
        "ranks": len(report.ends),
        "about": {key: str(run.meta.get(key, "")) for key in _ABOUT},
        "notes": [note for note in notes if note],
        "band": outcome.band._asdict(),
        "ended": ended,
        # In an observed run, the shares in the table of rules are of what rules would have changed.
        "observed": report.observed,
        "span": report.steps or [],
        "callouts": report.remarks,
        "kinds": [_kind(report, kind) for kind in report.history.kinds],
        "nothing": report.norms_title,
        "losses": [line(loss.name, loss.steps, loss.values) for loss in report.tagged],
        "rates": [line(rate.name, rate.steps, rate.values) for rate in report.rates],
        "versus": list(_versus(report)),
        "magnitudes": list(_magnitudes(report)),
        "rules": report.rule_table.plain(),
        "rule_file": section(run.meta, "rules"),
        "events": [_event(group) for group in first + last],
        "left_out": left_out,
        "marks": _marks(report.events),
    }


def _versus(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the section on each statistic that compares losses."""
    for table, curves in loss_tables(report.losses):
        stat = curves[0].stat
        if stat not in LOSS_STATS:
            continue
        lines = []
        for curve in curves[:_CURVES]:
            # A call that did not reach a loss has no point.
            known = ~np.isnan(curve.values)
            lowest = stat == COSINE
            lines.append(line(curve.name, curve.steps[known], curve.values[known], lowest=lowest))
        yield {"title": stat, "table": table.plain(), "lines": lines}


def _magnitudes(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the quantiles of each tensor with histograms; a few steps of many, and a few tensors of many."""
    for rule, name, steps, quantiles in islice(magnitudes_of(report.series), _MOST_MAGNITUDES):
        lines = []
        for share, values in zip(SHARES, quantiles, strict=True):
            lines.append(line(f"{share:.0%}", steps, values))
        yield {"name": name, "rule": rule, "lines": lines}


def _kind(report: Report, kind: str) -> dict[str, Any]:
    """Return the section on one kind of tensors: ranking, whole norm and map, each with a scale of its own."""
    history = report.history
    tracks = history.tracks_of(kind)
    urgent = ranked(tracks)[:_MOST_ROWS]
    lines = []
    if kind == GRADIENT:
        wholes = history.gradients
        for text, whole in zip(labels(wholes, len(report.params)), wholes, strict=True):
            lines.append(line(text, whole.steps, whole.norms))
    elif kind == WHOLE:
        for track in tracks:
            known = track.recorded
            lines.append(line(track.name, track.steps[known], track.norms[known]))
    columns = min(_MOST_COLUMNS, _MOST_CELLS // len(tracks))
    grid = grid_of(tracks, max(_LEAST_COLUMNS, columns))
    return {
        "kind": kind,
        "noun": nouns(kind),
        "table": norm_table(history, kind, urgent).plain(),
        "urgent": names_of(urgent),
        "wholes": lines,
        "map": {"names": names_of(tracks), **_map(grid)},
    }


def _map(grid: Grid) -> dict[str, Any]:
    raw = codes(grid).astype("<u2").tobytes()
    # High bytes hardly change from cell to cell: apart from the low bytes they compress to next to nothing.
    packed = zlib.compress(raw[1::2] + raw[::2])
    cells = b64encode(packed).decode("ascii")
    return {"firsts": grid.firsts.tolist(), "lasts": grid.lasts.tolist(), "cells": cells}


def codes(grid: Grid) -> Any:
    """Return a cell for each norm: 1 more than the upper half of its bits as float32, of which two digits are right."""
    bits = grid.norms.astype(np.float32).view(np.uint32) >> 16
    cells = np.where(np.isfinite(grid.norms), ZERO + bits, NONFINITE)
    return np.where(grid.norms == NO_NORM, ABSENT, cells)


def _marks(events: Sequence[Event]) -> list[list[Any]]:
    """Return the first step, the last step and the kind of what happened, successive steps together, oldest first."""
    spans: list[list[Any]] = []
    newest: dict[str, list[Any]] = {}
    for step, kind in sorted({(event.step, event.kind) for event in events}):
        span = newest.get(kind)
        if span is not None and step == span[1] + 1:
            span[1] = step
            continue
        newest[kind] = [step, step, kind]
        spans.append(newest[kind])
    # The beginning shows what went wrong first, the end what stopped the run.
    half = _MOST_MARKS // 2
    if len(spans) > _MOST_MARKS:
        del spans[half:-half]
    return spans


def _event(group: EventGroup) -> dict[str, Any]:
    return {**asdict(group.first), "repeated": group.repeated, "ranks": group.on_ranks}


def line(label: str, steps: Ints, values: Floats, *, lowest: bool = False) -> dict[str, Any]:
    """Return a curve as it travels in the page, the worst of every few values if there are many."""
    shown, numbers = thinned(steps, values, lowest=lowest)
    return {"label": label, "steps": shown, "values": numbers}
