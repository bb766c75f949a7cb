"""A report as plain values, for programs. The reference documents it under ``The report as JSON``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradsurgeon.report.rules_and_events import RuleInfo
from gradsurgeon.store.json_text import json_number

if TYPE_CHECKING:
    from gradsurgeon.report.ending import Ending
    from gradsurgeon.report.history import Track
    from gradsurgeon.report.losses import Measured
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
        "losses": list(map(_losses, report.losses)),
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


def _losses(one: Measured) -> dict[str, Any]:
    return {
        "rule": one.rule,
        "stat": one.stat,
        "name": one.name,
        "steps": [int(one.steps[0]), int(one.steps[-1])],
        "calls": len(one.values),
        "nonfinite": len(one.values) - len(one.finite),
        **{field: json_number(value) for field, value in one.numbers.items()},
        "one_call_in": one.every,
    }


def _norms(track: Track) -> dict[str, Any]:
    numbers = {field: getattr(track, field) for field in ("first", "median", "largest", "last")}
    return {
        "name": track.name,
        **track.source._asdict(),
        **{field: json_number(one) for field, one in numbers.items()},
        "spike": track.spike
        and {
            "step": track.spike.step,
            "value": json_number(track.spike.value),
            "times": json_number(track.spike.times),
        },
        "nonfinite": track.nonfinite,
        "nonfinite_step": track.nonfinite_steps[0] if track.nonfinite else None,
        "zero_since": track.zero_since,
    }
