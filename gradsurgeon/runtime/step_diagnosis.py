"""Diagnoses a failed step at the first trip of each trap that asks for it, together with other ranks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from torch import Tensor

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.distributed.ranks import OVERFLOWED
from gradsurgeon.forensics import (
    DERIVATIVE,
    LINE_FOLLOWS,
    LINE_HINT,
    diagnose,
    diagnose_inputs,
    with_bundle,
)
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.forensics.kept_step import FailedStep, KeptStep
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.loss_line_event import await_line, blamed_in
from gradsurgeon.runtime.trap_effects import Trap
from gradsurgeon.runtime.trap_report import TrapReport
from gradsurgeon.runtime.votes_heard import Heard
from gradsurgeon.tensors import _dist

# The kinds of faults that a lower loss scale does not mend.
_NO_OVERFLOW = frozenset({"mathematics", "bad input"})


@dataclass(frozen=True, slots=True, eq=False)
class Tripped:
    """The update that traps object to, or that a scaler skips.

    Attributes:
        kept: what is kept of it.
        sample_ids: the numbers of its samples, shape [n] for each batch.
        scale: the scale of a `GradScaler` on its gradients.
        told_at: the update before which the host hears of it, if the device decided.
        written: returns the weights and inputs that changed since.
    """

    step: int
    kept: KeptStep
    sample_ids: Sequence[Tensor]
    scale: Tensor | None
    told_at: int | None = None
    written: Callable[[], Sequence[str]] = tuple


class StepDiagnosis:
    def __init__(self, context: Context, kept: KeptCalls, effects: Effects) -> None:
        self._context = context
        self._kept = kept
        self._effects = effects
        # The rules whose next trip is diagnosed.
        self.pending = {trap.rule.id for trap in effects.traps if trap.compiled.forensics}

    def diagnose_trips(
        self,
        reports: Mapping[str, TrapReport],
        moment: Tripped,
        heard: Heard,
    ) -> dict[str, Diagnosis | None]:
        """Return diagnoses by rule, for rules that trip for the first time; all ranks take part if some objected."""
        is_shared = heard.severity > OVERFLOWED
        rules = set(reports)
        if is_shared:
            rules = {objection.rule for objection in heard.objections}
        due = rules & self.pending
        traps = []
        asked = []
        for trap in self._effects.traps:
            if trap.rule.id in due:
                traps.append(trap)
                asked.append(trap.rule.id)
        if not traps:
            return {}
        self.pending.difference_update(asked)
        # Another rank may have brought NaN or Inf into an average: without votes only that rank runs its calls again.
        is_innocent = all(report.guilty is False for report in reports.values())
        diagnosis = None
        if reports and (is_shared or not is_innocent):
            diagnosis = self._run(self._failed(moment, reports.values()), traps)
        if not self.pending:
            self._kept.detach()
        if is_shared:
            by_rank: dict[int, Diagnosis | None] = heard.exchange(diagnosis, "diagnosis")
            diagnoses = [each for each in (diagnosis, *by_rank.values()) if each is not None]
            # A diagnosis that blames an operation or tensor says most.
            diagnosis = max(diagnoses, key=attrgetter("blames"), default=None)
        return dict.fromkeys(asked, diagnosis)

    def diagnose_skip(self, trap: Trap, moment: Tripped, report: TrapReport) -> Diagnosis | None:
        """Return the diagnosis of a step that a scaler skipped for the first trap, if no loss scale can help."""
        if not self.pending:
            return None
        with suppress(Exception), self._context.resting():  # a skip needs no diagnosis
            failed = self._failed(moment, [report])
            if _dist.world() > 1:
                return diagnose_inputs(failed)
            diagnosis = self._replayed(failed)
            if diagnosis.cause is None or diagnosis.cause.fault not in _NO_OVERFLOW:
                return None
            # The loss scale has no effect on inputs and on the forward pass. An infinity may be meant.
            is_scaled = diagnosis.what != "NaN" or diagnosis.where == "backward"
            # A derivative in the graph of the loss has no scale.
            is_graph = diagnosis.output is not None and diagnosis.output.name == DERIVATIVE
            if diagnosis.certainty == "reproduced" or is_graph or not is_scaled:
                return self._awaiting_line(diagnosis, failed, [trap])
        return None

    def _failed(self, moment: Tripped, reports: Collection[TrapReport]) -> FailedStep:
        modules: list[str] = []
        bad: list[str] = []
        for report in reports:
            modules += report.modules
            bad += report.bad
        rested = sorted([effect.rule.id for effect in self._effects.sites if effect.edits])
        kept = replace(moment.kept)
        for call in kept.calls:
            call.forget_overwritten()
        factor = None
        if moment.scale is not None:
            factor = float(moment.scale)
        return FailedStep(
            kept,
            moment.step,
            _dist.rank(),
            factor,
            tuple(modules),
            tuple(bad),
            tuple(rested),
            self._context.are_averaged,
            tuple(moment.written()),
        )

    def _run(self, failed: FailedStep, traps: Sequence[Trap]) -> Diagnosis | None:
        """Run the calls of this rank again."""
        try:
            with self._context.resting():
                diagnosis = self._awaiting_line(self._replayed(failed), failed, traps)
                return with_bundle(diagnosis, failed, self._folder(traps))
        except Exception as error:  # noqa: BLE001 # the decision of the trap stays
            text = f"the step could not be diagnosed: {type(error).__name__}: {error}"
            rule = traps[0].rule.id
            self._context.event_log.emit("notice", text, rule=rule, step=failed.step)
            return None

    def _awaiting_line(
        self, diagnosis: Diagnosis, failed: FailedStep, traps: Sequence[Trap]
    ) -> Diagnosis:
        """Wait for the line of an operation of the loss, which the next pass shows, if the training goes on."""
        reactions = set()
        if self._context.acts:
            reactions = {trap.then for trap in traps}
        loss = failed.kept.losses.get(diagnosis.micro_batch)
        if loss is None or not loss.nodes:
            return diagnosis
        if "raise" in reactions or LINE_HINT not in diagnosis.reasons:
            return diagnosis
        source = blamed_in(loss, diagnosis)
        warns = "warn" in reactions
        line = self._kept.loss_line
        await_line(line, source, self._context, traps[0].rule.id, failed.step, warns=warns)
        reasons = [LINE_FOLLOWS if reason == LINE_HINT else reason for reason in diagnosis.reasons]
        return replace(diagnosis, reasons=tuple(reasons))

    def _replayed(self, failed: FailedStep) -> Diagnosis:
        replay = partial(diagnose, failed, watch_tags=self._context.watching_tags)
        if self._context.on_failed_step is not None:
            self._context.on_failed_step(partial(replay, debugger=True))
        with self._kept.resting():
            diagnosis = replay()
        before = self._context.curves.before(failed.step)
        return replace(diagnosis, before=before, build=self._context.build)

    def _folder(self, traps: Sequence[Trap]) -> Path | None:
        writer = self._context.recorder.writer
        if writer is not None and not writer.closed:
            return writer.path
        for trap in traps:
            if trap.compiled.bundle:
                return Path("gradsurgeon-traps")
        return None
