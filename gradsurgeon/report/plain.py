"""A report as plain values, for programs. The reference documents it under ``The report as JSON``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradsurgeon.report.losses import Combined, Compared
from gradsurgeon.report.rules_and_events import RuleInfo
from gradsurgeon.store.layout import json_number

if TYPE_CHECKING:
    from gradsurgeon.report.ending import Ending
    from gradsurgeon.report.history import Track
    from gradsurgeon.report.report import Report


def to_dict(report: Report) -> dict[str, Any]:
    """Return a report as values that JSON has; NaN and infinity are texts."""
    rules = dict.fromkeys((*report.rules, *report.statuses))
    return {
        "version": 1,
        "title": report.title,
        "ended": None if report.ended is None else _ended(report.ended, report),
        "steps": None if report.steps is None else list(report.steps),
        "notes": list(report.notes),
        # A sentence like the others, though nothing may be wrong.
        "remarks": [*report.remarks, *filter(None, [report.frozen_note])],
        "params": list(report.params),
        "rules": [_rule(report, rule) for rule in rules],
        "events": [asdict(event) for event in report.events],
        "norms": list(map(_norms, report.history.tracks)),
        "losses": list(map(_plain, report.tagged)),
        "conflicts": list(map(_compared, report.losses.compared)),
        "combined": list(map(_combined, report.losses.combined)),
        "median_of_one_step_in": report.history.sampled,
    }


def _ended(ended: Ending, report: Report) -> dict[str, Any]:
    words = ended.words + ended.outcome(report.events)
    ranks = {str(rank): words for rank, words in ended.ranks.items()}
    return {"state": ended.state, "words": words, "ranks": ranks}


def _rule(report: Report, rule: str) -> dict[str, Any]:
    info, status = report.rules.get(rule, RuleInfo("?")), report.statuses.get(rule)
    values = None if status is None else asdict(status)
    return {"id": rule, "action": info.action, "role": info.role, "status": values}


def _compared(found: Compared) -> dict[str, Any]:
    return {
        "rule": found.rule,
        "losses": list(found.losses),
        "steps": list(found.steps),
        "one_call_in": found.every,
        "pairs": list(map(_plain, found.pairs)),
    }


def _combined(found: Combined) -> dict[str, Any]:
    values = _plain(found)
    weights = list(map(_plain, found.weights))
    return {
        "one_call_in": values.pop("every"),
        **values,
        "steps": list(found.steps),
        "weights": weights,
    }


def _norms(track: Track) -> dict[str, Any]:
    numbers = {field: getattr(track, field) for field in ("first", "median", "largest", "last")}
    return {
        "name": track.name,
        **_plain(track.source),
        **{field: json_number(one) for field, one in numbers.items()},
        "spike": None if track.spike is None else _plain(track.spike),
        "nonfinite": track.nonfinite,
        "nonfinite_step": track.nonfinite_steps[0] if track.nonfinite else None,
        "zero_since": track.zero_since,
    }


def _plain(source: Any) -> dict[str, Any]:
    """Return the fields of a named tuple without its curve."""
    fields = source._asdict()
    fields.pop("curve", None)
    return {
        name: json_number(one) if isinstance(one, float) else one for name, one in fields.items()
    }
