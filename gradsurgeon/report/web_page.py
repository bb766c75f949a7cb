"""A run, or several, as one page of HTML that needs nothing else: no server, no network, no other file.

Everything the page shows travels in it as JSON, which its scripts write as text: names and messages from
a run are never markup.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from importlib import resources
from string import Template
from typing import Any

import numpy as np

from gradsurgeon.events import Event, is_trip
from gradsurgeon.report.callouts import nouns
from gradsurgeon.report.diagnoses import diagnosis_of, first_diagnosis
from gradsurgeon.report.grid import Grid, grid_of
from gradsurgeon.report.history import Track, Whole
from gradsurgeon.report.loss_charts import combined_data, compared_data
from gradsurgeon.report.norms import NormTable, labels, newest_table, ranked
from gradsurgeon.report.page_values import Line, line_data, thinned
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import GRADIENT, EventGroup, event_groups, rule_table
from gradsurgeon.report.sources import from_run
from gradsurgeon.store.captures import captures
from gradsurgeon.store.layout import section
from gradsurgeon.store.rank_file import StoredSeries
from gradsurgeon.store.run import Run

# What every page begins with: nothing else is written over.
BEGINNING = "<!doctype html>\n<!-- gradsurgeon report -->"
_LARGEST = 10
# A cell is the logarithm of a norm, in the smallest steps at which all norms of float32 fit: it is right
# to two digits.
LOWEST, STEP = -46.0, 0.0013
ABSENT, ZERO, FIRST, NONFINITE = 0, 1, 2, 0xFFFF
_MOST_COLUMNS, _LEAST_COLUMNS, _MOST_CELLS = 1500, 200, 750_000
_MOST_VALUES = 20 * 2**20
_MOST_MARKS = 600
_MOST_LOSSES = 8
# A word of its own, be it by underscores, dots or capitals: `val_loss`, `lossKL`, `trainLoss`, but no `gloss`.
_LOSS = re.compile(
    r"((?<![A-Za-z])|(?<=[A-Z]))loss(es)?(?![a-z])|(?<![A-Z])Loss(es)?(?![a-z])|(?<![A-Za-z])LOSS(ES)?(?![A-Za-z])"
)
# Of a loss, which is one number, they are all the same; with its sign is better than without.
_STATS = ("mean", "min", "max", "l2", "l1", "linf")
_STYLES = ("uplot.min.css", "page.css")
_SCRIPTS = ("uplot.min.js", "shared.js", "charts.js", "map.js", "sections.js", "live.js", "page.js")


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
        GradSurgeonError: numpy is missing.
    """
    report = from_run(run)
    return {
        "title": _title(run, report),
        "folder": str(run.path),
        "facts": list(_facts(run, report)),
        "notes": [*report.notes, *filter(None, [report.frozen_note])],
        **_ending(report),
        # In which the shares of what rules changed are of what they would have changed.
        "observed": report.observed,
        "span": list(report.steps or ()),
        "callouts": list(report.remarks),
        "kinds": [_kind(report, table) for table in report.norms],
        "nothing": report.norms_title,
        "losses": [line_data(line) for line in _losses(run)],
        "captures": [one.model_dump(exclude_none=True) for one in captures(run)[0]],
        "versus": [
            *(compared_data(one) for one in report.losses.compared),
            *(combined_data(one, observed=report.observed) for one in report.losses.combined),
        ],
        "rules": rule_table(report.rules, report.statuses, report.events).plain(),
        "files": _rule_files(run),
        **_events(report.events),
    }


def _ending(report: Report) -> dict[str, Any]:
    ended = report.ended
    if ended is None:
        return {"ended": None, "diagnosis": ""}
    words = ended.words + ended.outcome(report.events)
    level = ended.level(report.events)
    trips = sum(is_trip(one, ended.edits) for one in report.events)
    return {
        "ended": {"state": ended.state, "level": level, "words": words, "trips": trips},
        "diagnosis": first_diagnosis(report.events, ended.edits),
    }


def _kind(report: Report, table: NormTable) -> dict[str, Any]:
    """Return the section on one kind of tensors: ranking, whole norm and map, each with a scale of its own."""
    shown = ranked(table.tracks)[:_LARGEST]
    most = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, _MOST_CELLS // max(1, len(table.tracks))))
    wholes = report.history.gradients if table.kind == GRADIENT else []
    texts = labels(wholes, len(report.params))
    largest = newest_table(report.history, table, _LARGEST)
    rows = [[*row, _spike(one)] for row, one in zip(largest.rows, shown, strict=True)]
    return {
        "kind": table.kind,
        "noun": nouns(table.kind),
        # The map shows all tensors: none is left out.
        "notes": [text for text in largest.notes if not text.startswith("and ")],
        "table": largest._replace(head=[*largest.head, "spike"], rows=rows).plain(),
        "largest": [track.name for track in shown],
        "wholes": [line_data(_line(text, one)) for text, one in zip(texts, wholes, strict=True)],
        "map": _map(table.tracks, grid_of(table.tracks, most)),
    }


def _spike(track: Track) -> str:
    spike = track.spike
    return "-" if spike is None else f"{spike.times:.3g} x at step {spike.step}"


def _line(label: str, whole: Whole) -> Line:
    return thinned(Line(label, whole.steps.tolist(), whole.values.tolist(), whole.every))


def _title(run: Run, report: Report) -> str:
    """Return the title without the folder of the rule file, whose path stands at its text."""
    folder, _, _ = str(section(run.meta, "rules").get("file", "")).rpartition("/")
    return report.title.removeprefix(f"{folder}/") if folder else report.title


def _facts(run: Run, report: Report) -> Iterator[tuple[str, str]]:
    if report.steps is not None:
        yield "steps", f"{report.steps[0]:,} to {report.steps[1]:,}"
    if report.ended is not None and len(report.ended.ranks) > 1:
        yield "ranks", str(len(report.ended.ranks))
    for key, word in (("created", "began"), ("torch", "torch"), ("gradsurgeon", "gradsurgeon")):
        if key in run.meta:
            yield word, str(run.meta[key])


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
        yield _curve(f"{name}, rank {rank}" if several else name, series, name)


def _curve(label: str, series: StoredSeries, name: str) -> Line:
    """Return what a series holds of one tensor."""
    every = max(1, -(-len(series) // _MOST_VALUES))
    pairs = (
        series.of(name)
        if every == 1
        else [(row.step, row.values[series.columns[name]]) for row in series.sample(every)]
    )
    return thinned(Line(label, [step for step, _ in pairs], [value for _, value in pairs], every))


def _preference(stat: str) -> int:
    return [*_STATS, stat].index(stat)


def _map(tracks: Sequence[Track], grid: Grid) -> dict[str, Any]:
    raw = codes(grid).astype("<u2").tobytes()
    # High bytes hardly change from cell to cell: apart from the low ones they are packed to next to nothing.
    packed = zlib.compress(raw[1::2] + raw[::2])
    return {
        "names": [track.name for track in tracks],
        "firsts": grid.firsts.tolist(),
        "lasts": grid.lasts.tolist(),
        "cells": b64encode(packed).decode("ascii"),
    }


def codes(grid: Grid) -> Any:
    """Return a cell for each norm: its logarithm, or one of four signs. Larger norms have larger cells."""
    with np.errstate(all="ignore"):
        cells = ((np.log10(grid.tops) - LOWEST) / STEP + 0.5).astype(np.int64) + FIRST
    cells = np.where(grid.tops > 0, cells, np.where(grid.tops == 0, ZERO, ABSENT))
    return np.where(grid.bad > 0, NONFINITE, np.where(grid.there, cells, ABSENT))


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
    first, left_out, last = event_groups(events)
    marks = sorted({(event.step, event.kind) for event in events})
    half = _MOST_MARKS // 2
    return {
        "events": [_event(group) for group in (*first, *last)],
        "left_out": left_out,
        # The beginning tells what went wrong first, the end what stopped the run.
        "marks": marks if len(marks) <= _MOST_MARKS else [*marks[:half], *marks[-half:]],
    }


def _event(group: EventGroup) -> dict[str, Any]:
    """Return events that say the same as one, with where they were: steps, how often, and ranks."""
    (low, high), ranks = group.steps, group.ranks
    where = [f"step {low}" if low == high else f"steps {low} to {high}"]
    if group.times > 1:
        where.append(f"{group.times:,} times")
    if ranks != [0]:
        where.append(f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}")
    event = group.first
    return {
        **{field: getattr(event, field) for field in ("kind", "rule", "name", "message")},
        "where": ", ".join(where),
        "diagnosis": diagnosis_of(event.message),
    }
