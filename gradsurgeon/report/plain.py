"""A report as plain values, for programs. What is in it is documented under ``gradsurgeon report`` in the guide."""

from dataclasses import asdict
from typing import Any

from gradsurgeon.report.measurements import Spike
from gradsurgeon.report.norms import NormRow, norm_rows
from gradsurgeon.report.page import Report
from gradsurgeon.report.rules_and_events import RuleInfo
from gradsurgeon.store.json_text import json_number


def to_dict(report: Report) -> dict[str, Any]:
    """Return a report as values that JSON has; NaN and infinity are texts."""
    measurements = report.measurements
    norms = [_norms(row) for row in norm_rows(measurements, report.params, list(report.rules))]
    return {
        "version": 1,
        "title": report.title,
        "notes": list(report.notes),
        "params": list(report.params),
        "rules": [_rule(report, rule) for rule in dict.fromkeys((*report.rules, *report.statuses))],
        "events": [asdict(event) for event in report.events],
        "norms": norms,
        # Known once the norms have been read.
        "median_of_one_step_in": measurements.sampled,
    }


def _rule(report: Report, rule: str) -> dict[str, Any]:
    info, status = report.rules.get(rule, RuleInfo("?")), report.statuses.get(rule)
    values = None if status is None else asdict(status)
    return {"id": rule, "action": info.action, "role": info.role, "status": values}


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
