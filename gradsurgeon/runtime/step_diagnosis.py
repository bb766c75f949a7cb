"""Diagnoses a failed step at the first trip of each trap that asks for it, together with other ranks."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from torch import Tensor

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.distributed.ranks import OVERFLOWED
from gradsurgeon.distributed.session_discovery import LIMIT
from gradsurgeon.forensics import diagnose, diagnose_inputs, with_bundle
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.forensics.kept_step import FailedStep
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.trap_report import TrapReport
from gradsurgeon.runtime.votes_heard import Heard
from gradsurgeon.tensors import _dist

# The kinds of faults that a lower loss scale does not mend.
_NO_OVERFLOW = frozenset({"mathematics", "bad input"})


class StepDiagnosis:
    def __init__(self, context: Context, kept: KeptCalls, effects: Effects) -> None:
        self._context = context
        self._kept = kept
        self._effects = effects
        self._asked = {trap.rule.id for trap in effects.traps if trap.forensics}
        # The rules whose next trip is diagnosed.
        self.pending = set(self._asked)
        # The rules with a trip that ranks have diagnosed together.
        self._shared: set[str] = set()

    def diagnose_trips(
        self, reports: Mapping[str, TrapReport], step: int, scale: Tensor | None, heard: Heard
    ) -> dict[str, Diagnosis | None]:
        """Return diagnoses by rule, for rules that trip for the first time; all ranks take part if some objected."""
        objecting = {objection.rule for objection in heard.objections}
        asked = objecting.intersection(self._asked) - self._shared
        if heard.severity > OVERFLOWED and asked:
            self._shared |= asked
            self.pending -= asked
            failed = self._failed(step, scale, reports.values())
            return dict.fromkeys(asked, self._among_ranks(failed, reports, heard, asked))
        diagnoses = {}
        for rule, report in reports.items():
            if rule in self.pending:
                self.pending.discard(rule)
                diagnoses[rule] = self._of_this_rank(rule, report, step, scale)
        return diagnoses

    def _of_this_rank(
        self, rule: str, report: TrapReport, step: int, scale: Tensor | None
    ) -> Diagnosis | None:
        """Run the calls again, unless another rank brought NaN or Inf into an average. No rank waits for another."""
        if report.guilty is not False:
            return self._run(self._failed(step, scale, [report]), [rule])
        if not self.pending:
            self._kept.detach()
        return None

    def diagnose_skip(
        self, step: int, scale: Tensor | None, report: TrapReport
    ) -> Diagnosis | None:
        """Return the diagnosis of a step that a scaler skipped, if no loss scale can help."""
        if not self.pending:
            return None
        with suppress(Exception), self._context.resting():  # a skip needs no diagnosis
            failed = self._failed(step, scale, [report])
            if _dist.world() > 1:
                return diagnose_inputs(failed)
            diagnosis = self._replayed(failed)
            if diagnosis.cause is None or diagnosis.cause.fault not in _NO_OVERFLOW:
                return None
            # The loss scale has no effect on inputs and on the forward pass. An infinity may be meant.
            is_scaled = diagnosis.what != "NaN" or diagnosis.where == "backward"
            if diagnosis.certainty == "reproduced" or not is_scaled:
                return diagnosis
        return None

    def _failed(
        self, step: int, scale: Tensor | None, reports: Collection[TrapReport]
    ) -> FailedStep:
        modules: list[str] = []
        bad: list[str] = []
        for report in reports:
            modules += report.modules
            bad += report.bad
        rested = sorted([effect.rule.id for effect in self._effects.sites if effect.edits])
        kept = replace(self._kept.step)
        for call in kept.calls:
            call.forget_overwritten()
        factor = None
        if scale is not None:
            factor = float(scale)
        return FailedStep(
            kept, step, _dist.rank(), factor, tuple(modules), tuple(bad), tuple(rested)
        )

    def _among_ranks(
        self,
        failed: FailedStep,
        reports: Collection[str],
        heard: Heard,
        rules: Collection[str],
    ) -> Diagnosis | None:
        """Run the calls of this rank again, and exchange diagnoses with the ranks that come to this update."""
        assert heard.voter is not None  # noqa: S101 # ranks have objected
        own = self._run(failed, rules) if reports else None
        by_rank: dict[int, Diagnosis | None] = heard.voter.exchange(own, LIMIT)
        diagnoses = [diagnosis for diagnosis in (own, *by_rank.values()) if diagnosis is not None]
        # A diagnosis that blames an operation or tensor says most.
        return max(diagnoses, key=attrgetter("blames"), default=None)

    def _run(self, failed: FailedStep, rules: Collection[str]) -> Diagnosis | None:
        try:
            with self._context.resting():
                diagnosis = self._replayed(failed)
                return with_bundle(diagnosis, failed, self._folder(rules))
        except Exception as error:  # noqa: BLE001 # the decision of the trap stays
            text = f"the step could not be diagnosed: {type(error).__name__}: {error}"
            rule = next(iter(rules))
            self._context.event_log.emit("notice", text, rule=rule, step=failed.step)
            return None
        finally:
            if not self.pending:
                self._kept.detach()

    def _replayed(self, failed: FailedStep) -> Diagnosis:
        replay = partial(diagnose, failed, watch_tags=self._context.watching_tags)
        if self._context.on_failed_step is not None:
            self._context.on_failed_step(partial(replay, debugger=True))
        return replace(replay(), before=self._context.curves.before(failed.step))

    def _folder(self, rules: Collection[str]) -> Path | None:
        writer = self._context.recorder.writer
        if writer is not None and not writer.closed:
            return writer.path
        for trap in self._effects.traps:
            if trap.bundle and trap.rule.id in rules:
                return Path("gradsurgeon-traps")
        return None
