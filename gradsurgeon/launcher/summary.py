"""One model of a launched script, and its header and summary on stderr."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from gradsurgeon import planning
from gradsurgeon.actions import TrapRule
from gradsurgeon.errors import printable
from gradsurgeon.events import Event, is_trip
from gradsurgeon.launcher.messages import write
from gradsurgeon.planning import NO_MATCH, Plan
from gradsurgeon.planning.table import NOUNS, count, grid
from gradsurgeon.report.rules_and_events import trap_words
from gradsurgeon.runtime import Attachment

_MOST_EVENTS = 5


@dataclass(slots=True, eq=False)
class AttachedModel:
    title: str  # class name of the model, with a number if there are several of one class
    module: weakref.ref[nn.Module]  # weak, as in the session
    plan: Plan
    session: Attachment
    record: str  # the run directory, empty for none
    rank: int  # of this process; the process group may be gone at the end
    start: int  # number of the first update
    begun: bool = False  # training has begun, and the header is written
    replaced: bool = False  # another model with all of its parameters took its place

    def params(self) -> list[nn.Parameter]:
        """Return the parameters of the model; none once the model is gone."""
        module = self.module()
        return [] if module is None else list(module.parameters())

    def bound_ids(self) -> set[int]:
        names = {name for param in self.plan.manifest.params for name in param.names}
        return {
            id(slot.owner._parameters[slot.key])  # noqa: SLF001 # the slot itself
            for slot in planning.slots(self.module())
            if slot.name in names
        }


def write_header(
    model: AttachedModel, optimizers: Sequence[str], sinks: Sequence[str], *, observing: bool
) -> None:
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
        if text != NO_MATCH  # the row of the rule says so
    ]
    lines += [f"  note: {printable(text)}" for text in (*model.plan.warnings, *of_rules)]
    if observing:
        lines.append("  observing only: nothing is edited")
    if model.record:
        lines.append(f"  records: {printable(model.record)}")
    if sinks:
        lines.append(f"  sinks: {printable(', '.join(sinks))}")
    write(lines, model.rank)


def write_summary(model: AttachedModel) -> None:
    session = model.session
    statuses = session.status()
    if not model.begun and not any(status.fired for status in statuses.values()):
        text = "no gradient arrived, so no rule acted on it"
        write([f"gradsurgeon: {model.title}: {text}"], model.rank)
        return
    since = f", from step {model.start}" if model.start else ""
    lines = [f"gradsurgeon: {model.title}, {count(session.step - model.start, 'step')}{since}"]
    rows = []
    for rule in model.plan.rules.rules:
        if not model.plan.of(rule.id):
            continue
        status = statuses[rule.id]
        if not rule.edits and isinstance(rule, TrapRule):
            trips = [event for event in session.events if is_trip(event) and event.rule == rule.id]
            rows.append((printable(rule.id), rule.action, trap_words(status, trips), "", ""))
            continue
        changed = f"changed {status.changed:.0%}" if rule.edits else ""
        last = "" if status.last_step is None else f"last at step {status.last_step}"
        rows.append((printable(rule.id), rule.action, f"fired {status.fired:,}", changed, last))
    lines += grid(rows)
    lines += _events(session.events)
    if model.record and Path(model.record).is_dir():
        lines.append(f"  gradsurgeon report {printable(model.record)}")
    write(lines, model.rank)


def write_failures(model: AttachedModel) -> None:
    """Say which records are lost: at the end of the process, warnings are no longer shown."""
    lost = model.session.context.recorder.lost
    write([f"gradsurgeon: error: {model.title}: {text}" for text in lost], 0)  # of any rank


def _events(events: Sequence[Event]) -> list[str]:
    shown = [event for event in events if event.kind != "notice"]
    before = len(shown) - _MOST_EVENTS
    lines = [f"  {before} events before these"] if before > 0 else []
    for event in shown[-_MOST_EVENTS:]:
        text = printable(event.message.partition("\n")[0])
        rule = f", rule {printable(event.rule)}" if event.rule else ""
        # The message of an exception begins with the step.
        where = "" if text.startswith("step ") else f"step {event.step}{rule}: "
        lines.append(f"  {event.kind}: {where}{text}")
    return lines
