"""The header and the summary of a launched script, on stderr."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradsurgeon.actions import EditRule, TrapRule
from gradsurgeon.errors import printable
from gradsurgeon.events import Event
from gradsurgeon.launcher.attached_model import AttachedModel
from gradsurgeon.launcher.messages import write
from gradsurgeon.planning import NO_MATCH
from gradsurgeon.planning.table import NOUNS, count, grid

_MOST_EVENTS = 5


def write_header(model: AttachedModel, optimizers: Sequence[str]) -> None:
    rules, manifest = model.plan.rules, model.plan.manifest
    by = f", updated by {' and '.join(optimizers)}" if optimizers else ""
    by += f", from step {model.start}" if model.start else ""
    first = (
        f"gradsurgeon: {printable(rules.file)} on {model.title} "
        f"({count(len(manifest.params), 'parameter')}, {count(manifest.elements, 'element')}{by})"
    )
    rows = []
    for rule in rules.rules:
        bound = model.plan.of(rule.id)
        what = count(len(bound), NOUNS[rule.target]) if bound else "nothing in this model"
        when = "before each update" if isinstance(rule, TrapRule) else f"at {rule.point}"
        rows.append((printable(rule.id), rule.action, when, what))
    lines = [first, *grid(rows)]
    of_rules = [
        f"{rule}: {text}"
        for rule, texts in model.plan.rule_warnings.items()
        for text in texts
        if text != NO_MATCH  # its row says so
    ]
    lines += [f"  note: {printable(text)}" for text in (*model.plan.warnings, *of_rules)]
    if model.observing:
        lines.append("  observing only: nothing is edited")
    if model.record:
        lines.append(f"  records: {printable(model.record)}")
    write(lines, model.rank)


def write_summary(model: AttachedModel) -> None:
    session = model.session
    statuses = session.status()
    if not model.begun and not any(status.fired for status in statuses.values()):
        text = "no gradient came until the end, so no rule acted on it"
        write([f"gradsurgeon: {model.title}: {text}"], model.rank)
        return
    since = f", from step {model.start}" if model.start else ""
    lines = [f"gradsurgeon: {model.title}, {count(session.step - model.start, 'step')}{since}"]
    rows = []
    for rule in model.plan.rules.rules:
        if not model.plan.of(rule.id):
            continue
        status = statuses[rule.id]
        changed = f"changed {status.changed:.0%}" if isinstance(rule, EditRule) else ""
        last = "" if status.last_step is None else f"last at step {status.last_step}"
        rows.append((printable(rule.id), rule.action, f"fired {status.fired:,}", changed, last))
    lines += grid(rows)
    lines += _events(session.events)
    if model.record:
        lines.append(f"  gradsurgeon report {printable(model.record)}")
    write(lines, model.rank)


def _events(events: Sequence[Event]) -> list[str]:
    shown = [event for event in events if event.kind != "notice"]
    lines = []
    if len(shown) > _MOST_EVENTS:
        counts = Counter(event.kind for event in shown[:-_MOST_EVENTS])
        before = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        lines.append(f"  earlier: {before}")
    for event in shown[-_MOST_EVENTS:]:
        text = printable(event.message.partition("\n")[0])
        rule = f", rule {printable(event.rule)}" if event.rule else ""
        # Messages that are raised as well begin with the step.
        where = "" if text.startswith("step ") else f"step {event.step}{rule}: "
        lines.append(f"  {event.kind}: {where}{text}")
    return lines
