"""The header and the summary of one model of a launched script, as lines."""

import importlib
import os
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gradsurgeon.actions import CheckRule, Rule, TrapRule
from gradsurgeon.actions.scale import CANCELLED
from gradsurgeon.common._libraries import is_installed
from gradsurgeon.common.events import Event
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.integrations.launcher.next_commands import after_records
from gradsurgeon.language.planning import Plan, from_model
from gradsurgeon.language.planning.plan import rule_rows
from gradsurgeon.language.planning.table import count, grid
from gradsurgeon.records.store.recorded import RankEnd
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import EventGroup, group_lines
from gradsurgeon.report.run import open_run
from gradsurgeon.report.sources import unread
from gradsurgeon.runtime import Attachment
from gradsurgeon.runtime.context import mention
from gradsurgeon.runtime.session import Session
from gradsurgeon.tensors import _dist

# The model that others are like, and what was found in it.
Told = tuple[str, ...]


def prepare() -> None:
    """Import what the summary needs. Python forgets a KeyboardInterrupt if it defines certain classes at its exit."""
    if is_installed("numpy"):
        importlib.import_module("gradsurgeon.report.callouts")
        importlib.import_module("gradsurgeon.report.norms")
        importlib.import_module("gradsurgeon.report.rate_facts")


def header(plan: Plan, updated: str, start: int) -> Iterator[str]:
    """Yield the lines on a model and its rules."""
    path = os.path.relpath(plan.rules.file)
    facts = [
        count(len(plan.manifest.params), "parameter"),
        count(plan.manifest.elements, "element"),
    ]
    if updated:
        facts.append(updated)
    if start:
        facts.append(f"from step {start}")
    yield f"gradsurgeon: {printable(path)} on {plan.subject} ({', '.join(facts)})"
    rows = []
    for rule, row in zip(plan.rules.rules, rule_rows(plan), strict=True):
        binds = row.binds
        if row.rule in plan.refused:
            binds = "rests"
        schedule = ""
        if row.steps != "all":
            schedule = f"steps {row.steps}"
        rows.append((printable(row.rule), row.action, _moment(rule), binds, schedule))
    yield from grid(rows)
    for text in plan.warnings:
        yield f"  note: {printable(text)}"
    for rule_id, texts in plan.rule_warnings.items():
        for text in texts:
            # The optimizer is known, and a line names it.
            if text != CANCELLED:
                yield f"  note: {printable(f'{rule_id}: {text}')}"


def _moment(rule: Rule) -> str:
    if isinstance(rule, TrapRule) and rule.point != "updated":
        return "before each update"
    if isinstance(rule, CheckRule):
        return "around updates"
    return f"at {rule.point}"


def summary(
    attachment: Attachment, start: int, record: Path | None, like: str, told: dict[Told, str]
) -> Iterator[str]:
    """Yield the lines on what rules did to a model; one line if all of it was told of one that is like it."""
    plan = attachment.plan
    statuses = attachment.status()
    fired = {rule_id for rule_id, status in statuses.items() if status.fired}
    if not fired:
        if attachment.context.refusals.over:
            return  # a line has said so
        if not attachment.controller.has_gradients:
            yield f"gradsurgeon: {plan.subject}: no gradient arrived, so no rule acted on it"
            return
    updates = attachment.step - start
    text = f"gradsurgeon: {plan.subject}, {count(updates, 'step')}"
    if start:
        text += f", from step {start}"
    report = _report(attachment, record)
    outcome = report.outcome
    events = [event.message.replace(mention(plan.subject), "", 1) for event in report.events]
    now = (like or plan.subject, outcome.found, *outcome.callout_lines, *events)
    if now in told:
        yield f"{text}: the same as {told[now]}"
        return
    told[now] = printable(plan.subject)
    yield text
    for line in outcome.top:
        yield f"  {line}"
    yield from _work(attachment, report, fired)
    rules = [rule for rule in plan.rules.rules if isinstance(rule, CheckRule)]
    checks = [printable(rule.id) for rule in rules if rule.id in fired]
    if checks:
        yield f"  checked: {', '.join(checks)}; found: {outcome.found}"
    for line in outcome.callout_lines:
        yield f"  {line}"
    yield from _event_lines(report.events, "\n".join(outcome.top))
    for command in after_records(record, report.events, attachment.context.build):
        yield f"  next: {printable(command)}"


def _report(attachment: Attachment, record: Path | None) -> Report:
    """Return the report of the records in memory and of the events of all ranks, which says how the training ended."""
    recorded = Session(attachment).recorded()
    end = RankEnd("finished", attachment.context.recorder.ending, None)
    report = unread(replace(recorded, ends={_dist.rank(): end}))
    if record is not None and attachment.context.ranks.are_several:
        with suppress(GradSurgeonError), open_run(record) as run:
            report = replace(report, events=run.events)
    model = attachment.model()
    if model is None:
        return report
    # A script may freeze more after the plan was made.
    frozen = {}
    for param in from_model(model).params:
        if not param.requires_grad or param.sharding:
            frozen[param.name] = param.numel
    return replace(report, frozen=frozen)


def _work(attachment: Attachment, report: Report, fired: AbstractSet[str]) -> Iterator[str]:
    """Yield the table of the rules that could act, without checks."""
    resting = attachment.context.refusals.resting - fired
    acted = {}
    for rule in attachment.plan.rules.rules:
        if (
            not isinstance(rule, CheckRule)
            and attachment.plan.of(rule.id)
            and rule.id not in resting
        ):
            acted[rule.id] = report.statuses[rule.id]
    if acted:
        table = replace(report, statuses=acted).rule_table
        yield from grid([table.head, *table.rows], right=table.right)


def _event_lines(events: Sequence[Event], top: str) -> Iterator[str]:
    """Yield a line for each group of events that the first lines do not tell."""
    shown = []
    for event in events:
        is_told = event.message.partition("\n")[0] in top
        if event.kind not in ("fact", "notice") and not is_told:
            shown.append(event)
    yield from group_lines(shown, _line)


def _line(group: EventGroup) -> Iterator[str]:
    event = group.first
    text = printable(event.message.partition("\n")[0])
    # The message of an exception begins with the step.
    if not text.startswith("step "):
        where = f"step {event.step}"
        if event.rule:
            where += f", rule {printable(event.rule)}"
        text = f"{where}: {text}"
    if group.repeated:
        text += f" ({group.repeated})"
    if group.on_ranks:
        text = f"{group.on_ranks}: {text}"
    yield f"  {event.kind}: {text}"
