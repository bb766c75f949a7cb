"""Reports of a session and of a run directory, and what `run.json` says of a run."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from gradsurgeon.actions import Rule
from gradsurgeon.errors import printable
from gradsurgeon.planning import Plan
from gradsurgeon.planning.table import count
from gradsurgeon.report.losses import LOSS_STATS
from gradsurgeon.report.measurements import STAT, WholeMeasurements
from gradsurgeon.report.page import Report
from gradsurgeon.report.rules_and_events import RuleInfo
from gradsurgeon.schema import VERSION
from gradsurgeon.store import Records, job
from gradsurgeon.store.layout import section

if TYPE_CHECKING:
    from gradsurgeon.session import Session
    from gradsurgeon.store.captures import CapturedByRule
    from gradsurgeon.store.run import Run

# So many values are read as they are; of more the summaries are read.
_MOST_VALUES = 4 * 2**20
_WHOLE = 2**62


def summary(session: Session | Run) -> Report:
    """Return the report of a session, running or removed, or of a run. Waits for the device."""
    if hasattr(session, "ranks"):
        return from_run(cast("Run", session))
    plan = session.plan
    attachment = session._attachment  # noqa: SLF001 # what a report needs is nothing for users
    rules = {
        rule.id: RuleInfo(
            action=rule.action,
            role=_role(rule),
            logged=tuple(binding.name for binding in plan.of(rule.id))
            if rule.target == "params" and STAT in getattr(rule, "stats", ())
            else (),
            losses=_losses(rule, plan),
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
        observed=attachment.options.mode == "observe",
    )


def _losses(rule: Rule, plan: Plan) -> tuple[str, ...]:
    """Return what the numbers of a rule are between: losses, or the modules that send gradients back."""
    if not LOSS_STATS.intersection(getattr(rule, "stats", ())):
        return ()
    return getattr(rule, "losses", None) or tuple(binding.name for binding in plan.of(rule.id))


def _role(rule: Rule) -> str:
    """Return what a rule is to a reader: a trap that cuts gradients edits them."""
    return "edit" if rule.edits else rule.role


def from_run(run: Run) -> Report:
    """Return the report of a run directory, finished or still being written."""
    from gradsurgeon.store.captures import captures  # noqa: PLC0415 # it needs SQLite

    start = run.meta.get("start_step")
    captured, problem = captures(run)
    return Report(
        title=title_of(run),
        params=run.params,
        rules=rule_infos(run),
        statuses=run.status(),
        records=_records(run),
        events=tuple(run.events),
        notes=(*_notes(run), *([problem] if problem else [])),
        start=start if isinstance(start, int) else None,
        captures=tuple(_capture_lines(captured)),
        observed=run.meta.get("mode") == "observe",
    )


def _capture_lines(captured: Sequence[CapturedByRule]) -> Iterator[str]:
    for one in captured:
        steps = sorted({tensor.step for tensor in one.tensors})
        of = f"step {steps[-1]}" if len(steps) == 1 else f"steps {steps[0]}..{steps[-1]}"
        tensors = count(len(one.tensors) + one.more, "tensor")
        yield f"captures kept by {printable(one.rule)}: {tensors} of {of}; `--html` shows them"


def rule_infos(run: Run) -> dict[str, RuleInfo]:
    roles, stats = section(run.meta, "roles"), run.stats
    return {
        rule["id"]: RuleInfo(
            action=rule["action"],
            role=str(section(roles, rule["id"]).get("role", "edit")),
            logged=run.names_of(rule["id"]) if STAT in stats.get(rule["id"], ()) else (),
            losses=_losses_in(section(roles, rule["id"]), run.names_of(rule["id"])),
        )
        for rule in run.rules
    }


def _losses_in(role: Mapping[str, Any], bound: Sequence[str]) -> tuple[str, ...]:
    if LOSS_STATS.isdisjoint(map(str, _list(role.get("stats")))):
        return ()
    return tuple(map(str, _list(role.get("losses")) or bound))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def title_of(run: Run) -> str:
    rules, model = section(run.meta, "rules"), section(run.meta, "model")
    return f"{rules.get('file', '?')} on {model.get('title') or model.get('origin', '?')}"


def _records(run: Run) -> Records | WholeMeasurements:
    from gradsurgeon.store.run import of_lowest_ranks  # noqa: PLC0415 # it needs SQLite

    shown = list(of_lowest_ranks(run))
    read = {STAT, *LOSS_STATS}
    values = sum(len(one) * len(one.key.names) for one, _ in shown if one.key.stat in read)
    if values > _MOST_VALUES:
        from gradsurgeon.report.stored_measurements import OnDisk  # noqa: PLC0415 # it needs SQLite

        return OnDisk(run)
    records = Records(limit_bytes=_WHOLE)
    for series, repeated in shown:
        if series.key.stat in read:
            rows = series.rows()
        else:  # a report only says that it is there, and how long
            rows = chain(series.rows(0, 1), series.rows(max(1, len(series) - 1)))
        for row in rows:
            absent = row.absent | repeated
            records.add(series.key, row.step, row.values.tobytes(), absent)
    return records


def _notes(run: Run) -> tuple[str, ...]:
    notes = []
    if run.meta.get("mode") == "observe":
        notes.append("observed only: no rule changed anything")
    states = run.states
    several = len(states) > 1
    if several:
        notes.append(f"{len(states)} ranks, norms of the lowest that has them")
    for state, text in (
        ("running", "still running"),
        ("stopped", "ended without being closed: the last second may be missing"),
    ):
        if ranks := [str(rank) for rank, found in states.items() if found == state]:
            notes.append(f"rank {', '.join(ranks)} {text}" if several else text)
    return tuple(notes)


def describe(plan: Plan, *, mode: str, start_step: int, torch: str) -> dict[str, Any]:
    """Return what `run.json` says of a run, as plain values; `from_run` reads it."""
    rules = plan.rules
    return {
        "gradsurgeon": VERSION,
        "torch": torch,
        "python": platform.python_version(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "job": job.current(),
        "mode": mode,
        "start_step": start_step,
        "rules": {
            "file": rules.file,
            "text": rules.text,
            "sha256": rules.sha256,
            "files": [{"file": file, "text": text} for file, text in rules.files],
        },
        "model": {
            "origin": plan.manifest.origin,
            "title": plan.subject,
            "params": [
                {"name": param.name, "aliases": list(param.aliases)}
                for param in plan.manifest.params
            ],
            "aliases": {
                alias: module.name for module in plan.manifest.modules for alias in module.aliases
            },
        },
        "plan": plan.to_dict(),
        "roles": {
            rule.id: {
                "role": _role(rule),
                "stats": list(getattr(rule, "stats", ())),
                **({"losses": list(losses)} if (losses := getattr(rule, "losses", None)) else {}),
            }
            for rule in rules.rules
        },
    }
