"""A report as plain values, for programs. What is in it is documented under ``gradsurgeon report`` in the guide."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradsurgeon.report.losses import Combined, Compared, Pair
from gradsurgeon.report.rules_and_events import RuleInfo
from gradsurgeon.store.json_text import json_number

if TYPE_CHECKING:
    from gradsurgeon.report.history import Track
    from gradsurgeon.report.report import Report


def to_dict(report: Report) -> dict[str, Any]:
    """Return a report as values that JSON has; NaN and infinity are texts."""
    ended = report.ended
    return {
        "version": 1,
        "title": report.title,
        "ended": None
        if ended is None
        else {
            "state": ended.state,
            "words": ended.words + ended.outcome(report.events),
            "ranks": {str(rank): words for rank, words in ended.ranks.items()},
        },
        "steps": None if report.steps is None else list(report.steps),
        "notes": [*report.notes, *filter(None, [report.frozen_note])],
        "remarks": list(report.remarks),
        "params": list(report.params),
        "rules": [_rule(report, rule) for rule in dict.fromkeys((*report.rules, *report.statuses))],
        "events": [asdict(event) for event in report.events],
        "norms": list(map(_norms, report.history.tracks)),
        "conflicts": [_compared(one) for one in report.losses.compared],
        "combined": [_combined(one) for one in report.losses.combined],
        "median_of_one_step_in": report.history.sampled,
    }


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
        "pairs": list(map(_pair, found.pairs)),
    }


def _pair(pair: Pair) -> dict[str, Any]:
    numbers = ("cosine", "least", "below", "ratio", "opposed")
    return {
        "part": pair.part,
        "first": pair.first,
        "second": pair.second,
        "calls": pair.calls,
        "missing": pair.missing,
        **{key: json_number(getattr(pair, key)) for key in numbers},
        "below_from": pair.below_from,
    }


def _combined(found: Combined) -> dict[str, Any]:
    return {
        "rule": found.rule,
        "steps": list(found.steps),
        "one_call_in": found.every,
        "calls": found.calls,
        "changed": json_number(found.changed),
        "distance": json_number(found.distance),
        "largest": json_number(found.largest),
        "largest_step": found.largest_step,
        "weights": [
            {
                "name": one.name,
                "calls": one.calls,
                **{key: json_number(getattr(one, key)) for key in ("mean", "least", "largest")},
            }
            for one in found.weights
        ],
    }


def _norms(track: Track) -> dict[str, Any]:
    spike = track.spike
    return {
        "name": track.name,
        "kind": track.source.kind,
        "rule": track.source.rule,
        "point": track.source.point,
        **{key: json_number(getattr(track, key)) for key in ("first", "median", "largest")},
        "spike": None
        if spike is None
        else {
            "step": spike.step,
            "value": json_number(spike.value),
            "times": json_number(spike.times),
        },
        "last": json_number(track.last),
        "nonfinite": track.nonfinite,
        "nonfinite_step": track.nonfinite_steps[0] if track.nonfinite else None,
        "zero_since": track.zero_since,
    }
