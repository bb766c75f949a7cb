"""Reports of a session, and of a run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gradsurgeon.report.measurements import STAT, Measurements
from gradsurgeon.report.page import Report
from gradsurgeon.report.rules_and_events import RuleInfo
from gradsurgeon.store import Records
from gradsurgeon.store.layout import section

if TYPE_CHECKING:
    from gradsurgeon.runtime import Session
    from gradsurgeon.store.run import Run

# So many values are read as they are; of more the summaries are read.
_MOST_VALUES = 4 * 2**20
_WHOLE = 2**62


def summary(session: Session | Run) -> Report:
    """Return the report of a session, running or removed, or of a run. Waits for the device.

    Raises:
        TypeError: it is neither.
    """
    if hasattr(session, "ranks"):
        return from_run(cast("Run", session))
    if not hasattr(session, "plan"):
        raise TypeError(
            f"a summary is of a Session or of a Run, not of {type(session).__name__}; open_run(path) "
            "opens a run directory"
        )
    plan = session.plan
    attachment = session._attachment  # noqa: SLF001 # what a report needs is nothing for users
    rules = {
        rule.id: RuleInfo(
            action=rule.action,
            role=rule.role,
            logged=tuple(binding.name for binding in plan.of(rule.id))
            if rule.target == "params" and STAT in getattr(rule, "stats", ())
            else (),
        )
        for rule in plan.rules.rules
    }
    return Report(
        title=f"{plan.rules.file} on {plan.subject}",
        params=tuple(param.name for param in plan.manifest.params),
        rules=rules,
        statuses=session.status(),
        records=attachment.records,
        events=tuple(session.events),
        start=attachment.options.start_step,
        end=session.step,
    )


def from_run(run: Run) -> Report:
    """Return the report of a run directory, finished or still being written."""
    start = run.meta.get("start_step")
    roles = section(run.meta, "roles")
    rules = {
        rule["id"]: RuleInfo(
            action=rule["action"],
            role=str(section(roles, rule["id"]).get("role", "edit")),
            logged=run.names_of(rule["id"]) if STAT in run.stats.get(rule["id"], ()) else (),
        )
        for rule in run.rules
    }
    return Report(
        title=title_of(run),
        params=run.params,
        rules=rules,
        statuses=run.status(),
        records=_records(run),
        events=tuple(run.events),
        notes=_notes(run),
        start=start if isinstance(start, int) else None,
    )


def title_of(run: Run) -> str:
    """Return which rules a run was of, and on which model."""
    rules, model = section(run.meta, "rules"), section(run.meta, "model")
    return f"{rules.get('file', '?')} on {model.get('title') or model.get('origin', '?')}"


def _records(run: Run) -> Records | Measurements:
    shown = list(run.lowest())
    values = sum(len(series) * len(series.key.names) for series in shown if series.key.stat == STAT)
    if values > _MOST_VALUES:
        from gradsurgeon.report.stored_measurements import OnDisk  # noqa: PLC0415 # it needs SQLite

        return OnDisk(run)
    records = Records(limit_bytes=_WHOLE)
    for series in shown:
        # Of the other statistics a report only says that they are there, and how long.
        last = len(series) - 1
        ranges = [(0, None)] if series.key.stat == STAT else [(0, 1), (max(1, last), None)]
        for row in (row for start_stop in ranges for row in series.rows(*start_stop)):
            records.add(series.key, row.step, row.values.tobytes(), row.absent)
    return records


def _notes(run: Run) -> tuple[str, ...]:
    notes = []
    if run.meta.get("mode") == "observe":
        notes.append("observed only: no rule changed anything")
    if len(run.ranks) > 1:
        notes.append(f"{len(run.ranks)} ranks, norms of the lowest that has them")
    by_state: dict[str, list[str]] = {}
    for rank, state in run.states.items():
        by_state.setdefault(state, []).append(str(rank))
    several = len(run.ranks) > 1
    for state, text in (
        ("running", "still running"),
        ("stopped", "ended without being closed: the last second may be missing"),
    ):
        if ranks := by_state.get(state):
            notes.append(f"rank {', '.join(ranks)} {text}" if several else text)
    return tuple(notes)
