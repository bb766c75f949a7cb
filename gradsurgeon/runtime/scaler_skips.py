"""Steps that a `GradScaler` skips: an overflow is an event, and a NaN that persists is a trap."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gradsurgeon.actions import NEVER
from gradsurgeon.common.events import NO_OVERFLOW
from gradsurgeon.distributed.ranks import StopReason
from gradsurgeon.runtime.effect import Due, Findings
from gradsurgeon.runtime.step_diagnosis import Tripped
from gradsurgeon.runtime.trap_effects import NonfiniteTrap, Trap
from gradsurgeon.runtime.trap_message import event_keys, texts
from gradsurgeon.runtime.trips import Conclusions
from gradsurgeon.runtime.update import Judged
from gradsurgeon.runtime.votes_heard import ALONE

_SKIPS = "the GradScaler skips the update"
SCALER_SKIP = "{scaler} skipped step {step}: the scaled gradients were not finite"


def judge_skip(
    conclusions: Conclusions,
    update: Judged,
    due: Due,
    loss_scale: Tensor,
    late: Tripped | None = None,
) -> StopReason | None:
    """Note a step that a scaler skipped; with ``late`` the host hears of it before a later update."""
    context = conclusions.context
    counter = update.counter
    counter.scaler_skips += 1
    tripped = late or conclusions.tripped(counter)
    text = SCALER_SKIP.format(scaler=context.scaler_name, step=tripped.step)
    facts = {"told_at": tripped.told_at}
    context.event_log.emit("scaler-skip", text, step=tripped.step, facts=facts)
    update.find_skipped()
    # A skip caused by other tensors says nothing about a trap: its row goes on.
    traps = []
    for bound in due.judges:
        trap = bound.effect
        if isinstance(trap, NonfiniteTrap) and update.concerns(bound.indices):
            traps.append(trap)
    findings: Findings = {}
    if not context.acts:
        traps = []
    is_low = float(loss_scale) < 1.0
    skips = counter.scaler_skips
    why = "its scale is below 1" if is_low else f"{skips} steps in a row"
    for trap in traps:
        patience = trap.compiled.patience
        if not is_low and skips < patience:
            continue
        # This trip exceeds `give_up_after`, and so does each later trip until the trap finds nothing.
        rule = trap.rule.id
        context.event_log.count_fired(rule, tripped.step)
        if patience < NEVER:
            counter.trips[rule] = max(counter.trips.get(rule, 0), patience - 1)
        head = f"the GradScaler keeps skipping ({why}): "
        report = update.report(context.names, head)
        findings[trap] = replace(report, goes_on=_SKIPS)
    # Overflows come in rows until the scale fits: not each is worth running the step again.
    if traps and not findings and skips == 1:
        _diagnose(conclusions, update, tripped, traps[0])
    return conclusions.conclude(counter, findings, ALONE, late=late)


def _diagnose(conclusions: Conclusions, update: Judged, tripped: Tripped, trap: Trap) -> None:
    """Report once the origin of a NaN in a skipped step, if it is no overflow."""
    context = conclusions.context
    step = tripped.step
    rule = trap.rule.id
    report = update.report(context.names)
    diagnosis = conclusions.diagnosis.diagnose_skip(trap, tripped, report)
    if diagnosis is not None:
        report = replace(report, head=NO_OVERFLOW, lines=[])
        facts = event_keys(diagnosis, tripped)
        text, shown = texts(context.place(step, rule), report, _SKIPS, diagnosis, facts)
        context.event_log.notice_once(
            "no-overflow", text, rule=rule, step=step, warn=True, facts=facts, shown=shown
        )
