"""The header and the summary of one model of a launched script, as lines."""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gradsurgeon.actions import CheckRule, Rule, TrapRule
from gradsurgeon.common._libraries import is_installed
from gradsurgeon.common.events import Event, RuleStatus, is_trip, settled
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.integrations.launcher.next_commands import after_records
from gradsurgeon.language.planning import NO_MATCH, Plan, from_model
from gradsurgeon.language.planning.plan import steps_text
from gradsurgeon.language.planning.table import NOUNS, count, grid
from gradsurgeon.records.store.recorded import RankEnd
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import EventGroup, shown_groups, trap_words
from gradsurgeon.report.run import open_run
from gradsurgeon.report.sources import unread
from gradsurgeon.runtime import Attachment
from gradsurgeon.runtime.session import Session
from gradsurgeon.tensors import _dist


def prepare() -> None:
    """Import what the summary needs. Python forgets a KeyboardInterrupt if it defines certain classes at its exit."""
    if is_installed("numpy"):
        importlib.import_module("gradsurgeon.report.callouts")
        importlib.import_module("gradsurgeon.report.norms")


def header(plan: Plan, optimizers: Sequence[str], owned: int, start: int) -> Iterator[str]:
    """Yield the lines on a model and its rules; optimizers hold so many `owned` parameters of it."""
    path = os.path.relpath(plan.rules.file)
    facts = [
        count(len(plan.manifest.params), "parameter"),
        count(plan.manifest.elements, "element"),
    ]
    if optimizers:
        text = f"updated by {' and '.join(optimizers)}"
        if owned < len(plan.manifest.params):
            text = f"{owned:,} of {len(plan.manifest.params):,} {text}"
        facts.append(text)
    if start:
        facts.append(f"from step {start}")
    yield f"gradsurgeon: {printable(path)} on {plan.subject} ({', '.join(facts)})"
    yield from grid([_row_of(rule, plan) for rule in plan.rules.rules])
    for text in plan.warnings:
        yield f"  note: {printable(text)}"
    for rule_id, texts in plan.rule_warnings.items():
        for text in texts:
            if text != NO_MATCH:  # the row of the rule says so
                yield f"  note: {printable(f'{rule_id}: {text}')}"


def _row_of(rule: Rule, plan: Plan) -> tuple[str, str, str, str, str]:
    matched = "nothing in this model"
    bound = len(plan.of(rule.id))
    if rule.id in plan.refused:
        matched = "rests"
    elif bound:
        matched = count(bound, NOUNS[rule.target])
    schedule = ""
    if not rule.steps.always:
        schedule = f"steps {steps_text(rule.steps)}"
    return printable(rule.id), rule.action, _moment(rule), matched, schedule


def _moment(rule: Rule) -> str:
    if isinstance(rule, TrapRule):
        return "before each update"
    if isinstance(rule, CheckRule):
        return "around updates"
    return f"at {rule.point}"


def _work_of(
    rule: Rule, status: RuleStatus, events: Sequence[Event], updates: int
) -> tuple[str, str, str]:
    if isinstance(rule, TrapRule) and not rule.edits:
        trips = [event for event in events if is_trip(event) and event.rule == rule.id]
        return trap_words(status, trips, updates), "", ""
    changed = ""
    if rule.edits and status.changed is not None:
        changed = f"changed {status.changed:.0%}"
    last = ""
    if status.last_step is not None:
        last = f"last at step {status.last_step}"
    return f"fired {status.fired:,}", changed, last


def summary(attachment: Attachment, start: int, record: Path | None, spec: str) -> Iterator[str]:
    """Yield the lines on what rules did to a model. `spec` is what `--model` needs to build it anew."""
    plan = attachment.plan
    statuses = attachment.status()
    fired = {rule_id for rule_id, status in statuses.items() if status.fired}
    if not fired and attachment.context.refusals.over:
        return  # a line has said so
    if not fired and not attachment.controller.has_gradients:
        yield f"gradsurgeon: {plan.subject}: no gradient arrived, so no rule acted on it"
        return
    updates = attachment.step - start
    text = f"gradsurgeon: {plan.subject}, {count(updates, 'step')}"
    if start:
        text += f", from step {start}"
    yield text
    report = _report(attachment, record)
    outcome = report.outcome
    for line in outcome.top:
        yield f"  {line}"
    rules = [rule for rule in plan.rules.rules if not isinstance(rule, CheckRule)]
    yield from grid(list(_rows_of_work(rules, statuses, attachment, updates)))
    checks = [
        printable(rule.id)
        for rule in plan.rules.rules
        if isinstance(rule, CheckRule) and rule.id in fired
    ]
    if checks:
        yield f"  checked: {', '.join(checks)}; found: {outcome.found}"
    for line in outcome.callout_lines:
        yield f"  {line}"
    yield from _event_lines(report.events, outcome.band.sentence)
    for command in after_records(record, report.events, spec):
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


def _rows_of_work(
    rules: Sequence[Rule],
    statuses: Mapping[str, RuleStatus],
    attachment: Attachment,
    updates: int,
) -> Iterator[tuple[str, ...]]:
    pending = attachment.pending_steps()
    resting = attachment.context.schedule.resting
    for rule in rules:
        status = statuses[rule.id]
        rests = rule.id in resting and not status.fired
        if attachment.plan.of(rule.id) and not rests:
            work = _work_of(rule, settled(status, pending), attachment.events, updates)
            yield (printable(rule.id), rule.action, *work)


def _event_lines(events: Sequence[Event], sentence: str) -> Iterator[str]:
    """Yield a line for each group of events that the band does not tell."""
    shown = []
    for event in events:
        is_told = event.message.partition("\n")[0] in sentence
        if event.kind != "notice" and not is_told:
            shown.append(event)
    first, left_out, last = shown_groups(shown)
    for group in first:
        yield _line(group)
    if left_out:
        yield f"  ... and {left_out:,} more"
    for group in last:
        yield _line(group)


def _line(group: EventGroup) -> str:
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
    return f"  {event.kind}: {text}"
