"""A report as values that JSON has."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradsurgeon.records.store.layout import json_number
from gradsurgeon.report.ending import Ending
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import COSINE, RuleInfo

if TYPE_CHECKING:
    from gradsurgeon.report.losses import LossSeries
    from gradsurgeon.report.track import Track


def to_dict(report: Report) -> dict[str, Any]:
    """Return a report as values that JSON has, documented under ``The report as JSON``."""
    ids = dict.fromkeys([*report.rules, *report.statuses])
    remarks = list(report.remarks)
    if report.frozen_note:
        # The note is a sentence like the others, though nothing may be wrong.
        remarks.append(report.frozen_note)
    return {
        "version": 1,
        "title": report.title,
        "band": report.outcome.band._asdict(),
        "ended": _ended(report.ended),
        "ranks": [rank._asdict() for rank in report.progress],
        "steps": report.steps,
        "notes": report.notes,
        "remarks": remarks,
        "params": report.params,
        "rules": [_rule(report, rule) for rule in ids],
        "events": [asdict(event) for event in report.events],
        "losses": [_losses(loss) for loss in report.losses],
        "rates": [_rate(rate) for rate in report.rates],
        "norms": [_norms(track) for track in report.history.tracks],
        "median_of_one_step_in": report.history.rows_of_a_column,
    }


def _ended(ending: Ending | None) -> dict[str, Any] | None:
    if ending is None:
        return None
    ranks = {str(rank): words for rank, words in ending.ranks.items()}
    return {"state": ending.state, "words": ending.words, "ranks": ranks}


def _rule(report: Report, rule: str) -> dict[str, Any]:
    info = report.rules.get(rule, RuleInfo("?"))
    status = report.statuses.get(rule)
    values = None
    if status is not None:
        values = {**asdict(status), "changed": status.changed}
    return {"id": rule, "action": info.action, "role": info.role, "status": values}


def _losses(loss: LossSeries) -> dict[str, Any]:
    from gradsurgeon.report.losses import thinned  # noqa: PLC0415 # needs numpy

    calls = len(loss.values)
    steps, values = thinned(loss.steps, loss.values, lowest=loss.stat == COSINE)
    return {
        "rule": loss.rule,
        "stat": loss.stat,
        "name": loss.name,
        "steps": steps,
        "values": values,
        "calls": calls,
        "nonfinite": calls - len(loss.finite),
        **{word: json_number(number) for word, number in loss.numbers.items()},
    }


def _rate(rate: LossSeries) -> dict[str, Any]:
    optimizer, _, group = rate.name.rpartition("/")
    # Records are float32.
    values = [json_number(float(f"{value:.7g}")) for value in rate.values]
    return {
        "optimizer": optimizer,
        "group": int(group),
        "steps": rate.steps.tolist(),
        "values": values,
    }


def _norms(track: Track) -> dict[str, Any]:
    values: dict[str, Any] = {"name": track.name, **track.origin._asdict()}
    for word in ("first", "median", "largest", "last"):
        values[word] = json_number(getattr(track, word))
    values["spike"] = None
    if track.spike is not None:
        step, value, times = track.spike
        values["spike"] = {"step": step, "value": json_number(value), "times": json_number(times)}
    steps = track.nonfinite_steps
    values["nonfinite"] = len(steps)
    values["nonfinite_step"] = int(steps[0]) if len(steps) else None
    values["zero_since"] = track.zero_since
    return values
