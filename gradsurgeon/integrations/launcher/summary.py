"""The header and the summary of one model of a launched script, as lines."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from gradsurgeon.actions import CheckRule, Rule, TrapRule
from gradsurgeon.common.events import Event, RuleStatus, is_trip, settled
from gradsurgeon.errors import printable
from gradsurgeon.language.planning import NO_MATCH, Plan, from_model
from gradsurgeon.language.planning.table import NOUNS, count, grid
from gradsurgeon.report.ending import first_diagnosis
from gradsurgeon.report.rules_and_events import EventGroup, never_reached, shown_groups, trap_words
from gradsurgeon.runtime import Attachment


def header(plan: Plan, optimizers: Sequence[str], start: int) -> Iterator[str]:
    by = f", updated by {' and '.join(optimizers)}" if optimizers else ""
    by += f", from step {start}" if start else ""
    size = f"{count(len(plan.manifest.params), 'parameter')}, {count(plan.manifest.elements, 'element')}"
    path = Path(plan.rules.file)
    here = Path.cwd()
    file = path.relative_to(here) if path.is_relative_to(here) else path
    yield f"gradsurgeon: {printable(str(file))} on {plan.subject} ({size}{by})"
    rows = []
    for rule in plan.rules.rules:
        bound = len(plan.of(rule.id))
        what = count(bound, NOUNS[rule.target]) if bound else "nothing in this model"
        what = "rests" if rule.id in plan.refused else what
        rows.append((printable(rule.id), rule.action, _moment(rule), what))
    yield from grid(rows)
    of_rules = [
        f"{rule}: {text}"
        for rule, texts in plan.rule_warnings.items()
        for text in texts
        if text != NO_MATCH  # the row of the rule says so
    ]
    yield from (f"  note: {printable(text)}" for text in (*plan.warnings, *of_rules))


def _moment(rule: Rule) -> str:
    if isinstance(rule, TrapRule):
        return "before each update"
    return "around updates" if isinstance(rule, CheckRule) else f"at {rule.point}"


def _work_of(rule: Rule, status: RuleStatus, events: Sequence[Event]) -> tuple[str, str, str]:
    if isinstance(rule, TrapRule) and not rule.edits:
        trips = [event for event in events if is_trip(event) and event.rule == rule.id]
        return trap_words(status, trips), "", ""
    changed = ""
    if rule.edits and status.changed is not None:
        changed = f"changed {status.changed:.0%}"
    last = ""
    if status.last_step is not None:
        last = f"last at step {status.last_step}"
    return f"fired {status.fired:,}", changed, last


def summary(attachment: Attachment, start: int, record: Path | None) -> Iterator[str]:
    plan = attachment.plan
    statuses = attachment.status()
    fired = {rule for rule, status in statuses.items() if status.fired}
    if not fired and attachment.context.refusals.over:
        return  # a line has said so
    if not (fired or attachment.controller.has_gradients):
        yield f"gradsurgeon: {plan.subject}: no gradient arrived, so no rule acted on it"
        return
    since = f", from step {start}" if start else ""
    yield f"gradsurgeon: {plan.subject}, {count(attachment.step - start, 'step')}{since}"
    diagnosis = printable(first_diagnosis(attachment.events))
    rows = []
    pending = attachment.pending_steps()
    checks = [rule for rule in plan.rules.rules if isinstance(rule, CheckRule) and rule.id in fired]
    resting = attachment.context.schedule.resting - fired
    for rule in plan.rules.rules:
        if not plan.of(rule.id) or isinstance(rule, CheckRule) or rule.id in resting:
            continue
        status = settled(statuses[rule.id], pending)
        rows.append((printable(rule.id), rule.action, *_work_of(rule, status, attachment.events)))
    yield from grid(rows)
    if checks:
        found = sum(event.kind == "check" for event in attachment.events)
        names = ", ".join(printable(rule.id) for rule in checks)
        nothing = "nothing else" if diagnosis else "nothing"
        yield f"  checked: {names}; found: {count(found, 'fault') if found else nothing}"
    if silent := _without_gradient(attachment):
        yield f"  {never_reached(silent)}"
    shown = [event for event in attachment.events if event.kind != "notice"]
    first, left_out, last = shown_groups(shown)
    more = [f"  ... and {left_out:,} more"] if left_out else []
    lines = [*map(_line, first), *more, *map(_line, last)]
    yield from lines
    # Without a diagnosis that is the line of the first trip.
    if diagnosis and not any(diagnosis in line for line in lines):
        yield f"  {diagnosis}"
    if record is not None and record.is_dir():
        yield f"  gradsurgeon report {printable(str(record))}"


def _without_gradient(attachment: Attachment) -> list[str]:
    records = attachment.records
    model = attachment.model()
    # A script may freeze more after the plan was made.
    now = attachment.plan.manifest if model is None else from_model(model)
    learning = {one.name for one in now.params if one.requires_grad and not one.sharding}
    every = [] if records.dropped else [one for one in records if one.key.point == "accumulated"]
    got = {name for one in every for name in learning & one.columns.keys() if one.last(name)}
    names = dict.fromkeys(name for one in every for name in one.key.names)
    return [name for name in names if name in learning - got]


def _line(group: EventGroup) -> str:
    event = group.first
    text = printable(event.message.partition("\n")[0])
    rule = f", rule {printable(event.rule)}" if event.rule else ""
    # The message of an exception begins with the step.
    where = "" if text.startswith("step ") else f"step {event.step}{rule}: "
    repeated = f" ({group.repeated})" if group.repeated else ""
    return f"  {event.kind}: {where}{text}{repeated}"
