"""A report as plain values, for programs. What is in it is documented under ``gradsurgeon report`` in the guide."""

from dataclasses import asdict
from typing import Any

from gradsurgeon.report.losses import Combined, Compared, Pair
from gradsurgeon.report.measurements import Spike
from gradsurgeon.report.norms import NormRow, norm_rows
from gradsurgeon.report.page import Report
from gradsurgeon.report.rules_and_events import RuleInfo
from gradsurgeon.store.json_text import json_number


def to_dict(report: Report) -> dict[str, Any]:
    """Return a report as values that JSON has; NaN and infinity are texts."""
    measurements = report.measurements
    norms = [_norms(row) for row in norm_rows(measurements, report.params, list(report.rules))]
    of_losses = report.of_losses()
    return {
        "version": 1,
        "title": report.title,
        "notes": list(report.notes),
        "params": list(report.params),
        "rules": [_rule(report, rule) for rule in dict.fromkeys((*report.rules, *report.statuses))],
        "events": [asdict(event) for event in report.events],
        "norms": norms,
        "conflicts": [_compared(one) for one in of_losses.compared],
        "combined": [_combined(one) for one in of_losses.combined],
        # Known once the norms have been read.
        "median_of_one_step_in": measurements.sampled,
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
        "since": pair.since,
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


def _norms(row: NormRow) -> dict[str, Any]:
    history = row.history
    return {
        "name": row.name,
        "rule": row.rule,
        "point": row.point,
        "first": json_number(history.first),
        "median": json_number(history.median),
        "largest": json_number(history.largest),
        "spike": None if history.spike is None else _spike(history.spike),
        "last": json_number(history.last),
        "nonfinite": history.nonfinite,
        "nonfinite_step": history.nonfinite_step if history.nonfinite else None,
    }


def _spike(spike: Spike) -> dict[str, Any]:
    value, times = json_number(spike.value), json_number(spike.times)
    return {"step": spike.step, "value": value, "times": times}
