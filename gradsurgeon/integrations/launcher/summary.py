"""The header and the summary of one model of a launched script, as lines."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gradsurgeon.actions import CheckRule, Rule, TrapRule
from gradsurgeon.common.events import Event, RuleStatus, is_trip, settled
from gradsurgeon.errors import printable
from gradsurgeon.language.planning import NO_MATCH, Plan, from_model
from gradsurgeon.language.planning.plan import steps_text
from gradsurgeon.language.planning.table import NOUNS, count, grid
from gradsurgeon.report.ending import first_diagnosis
from gradsurgeon.report.rules_and_events import EventGroup, never_reached, shown_groups, trap_words
from gradsurgeon.runtime import Attachment


def header(plan: Plan, optimizers: Sequence[str], start: int) -> Iterator[str]:
    path = Path(plan.rules.file)
    here = Path.cwd()
    if path.is_relative_to(here):
        path = path.relative_to(here)
    facts = [
        count(len(plan.manifest.params), "parameter"),
        count(plan.manifest.elements, "element"),
    ]
    if optimizers:
        facts.append(f"updated by {' and '.join(optimizers)}")
    if start:
        facts.append(f"from step {start}")
    yield f"gradsurgeon: {printable(str(path))} on {plan.subject} ({', '.join(facts)})"
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
    fired = {rule_id for rule_id, status in statuses.items() if status.fired}
    if not fired and attachment.context.refusals.over:
        return  # a line has said so
    if not fired and not attachment.controller.has_gradients:
        yield f"gradsurgeon: {plan.subject}: no gradient arrived, so no rule acted on it"
        return
    text = f"gradsurgeon: {plan.subject}, {count(attachment.step - start, 'step')}"
    if start:
        text += f", from step {start}"
    yield text
    rules = [rule for rule in plan.rules.rules if not isinstance(rule, CheckRule)]
    yield from grid(list(_rows_of_work(rules, statuses, attachment)))
    diagnosis = printable(first_diagnosis(attachment.events))
    checks = [rule for rule in plan.rules.rules if isinstance(rule, CheckRule) and rule.id in fired]
    if checks:
        names = ", ".join(printable(check.id) for check in checks)
        faults = _faults_found(attachment.events, diagnosis)
        yield f"  checked: {names}; found: {faults}"
    silent = _without_gradient(attachment)
    if silent:
        yield f"  {never_reached(silent)}"
    lines = list(_event_lines(attachment.events))
    yield from lines
    # Without a diagnosis that is the line of the first trip.
    if diagnosis and not any(diagnosis in line for line in lines):
        yield f"  {diagnosis}"
    if record is not None and record.is_dir():
        yield f"  gradsurgeon report {printable(str(record))}"


def _rows_of_work(
    rules: Sequence[Rule], statuses: Mapping[str, RuleStatus], attachment: Attachment
) -> Iterator[tuple[str, ...]]:
    pending = attachment.pending_steps()
    resting = attachment.context.schedule.resting
    for rule in rules:
        status = statuses[rule.id]
        rests = rule.id in resting and not status.fired
        if attachment.plan.of(rule.id) and not rests:
            work = _work_of(rule, settled(status, pending), attachment.events)
            yield (printable(rule.id), rule.action, *work)


def _faults_found(events: Sequence[Event], diagnosis: str) -> str:
    faults = sum(event.kind == "check" for event in events)
    if faults:
        return count(faults, "fault")
    if diagnosis:
        return "nothing else"
    return "nothing"


def _without_gradient(attachment: Attachment) -> list[str]:
    """Return the names of trained parameters that rules recorded, and that never got a gradient."""
    records = attachment.records
    if records.dropped:
        return []
    manifest = attachment.plan.manifest
    model = attachment.model()
    if model is not None:
        # A script may freeze more after the plan was made.
        manifest = from_model(model)
    silent = set()
    for param in manifest.params:
        if param.requires_grad and not param.sharding:
            silent.add(param.name)
    recorded: dict[str, None] = {}
    for series in records:
        if series.key.point != "accumulated":
            continue
        recorded.update(dict.fromkeys(series.key.names))
        for name in silent & series.columns.keys():
            if series.last(name):
                silent.remove(name)
    return [name for name in recorded if name in silent]


def _event_lines(events: Sequence[Event]) -> Iterator[str]:
    shown = [event for event in events if event.kind != "notice"]
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
