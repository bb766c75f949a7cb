"""Diagnoses a failed step at the first trip of each trap that asks for it, together with other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from gradsurgeon import _dist
from gradsurgeon.actions import Decision, EditRule
from gradsurgeon.diagnosis import Diagnosis
from gradsurgeon.distributed import fully_shard
from gradsurgeon.distributed.ranks import OVERFLOWED
from gradsurgeon.distributed.session_discovery import LIMIT
from gradsurgeon.forensics import diagnose, with_bundle
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.forensics.kept_step import FailedStep
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.rank_agreement import Heard
from gradsurgeon.runtime.trap_report import TrapReport

_NO_MEMORY = (
    "{ranks} has no memory for the whole parameters of the model and their gradients, which all ranks need to run the "
    "step again together"
)
_ABSENT = (
    "{ranks} did not come to this update, and all ranks must run a divided model again together"
)


class StepDiagnosis:
    def __init__(self, context: Context, kept: KeptCalls) -> None:
        self._context = context
        self._kept = kept
        self._asked = frozenset(
            rule
            for rule, decision in context.decisions.items()
            if isinstance(decision, Decision) and decision.forensics
        )
        # The rules whose next trip is diagnosed.
        self.pending = set(self._asked)
        # The rules with a trip that ranks have diagnosed together.
        self._shared: set[str] = set()

    def of(
        self, reports: Mapping[str, TrapReport], step: int, scale: Tensor | None, heard: Heard
    ) -> dict[str, Diagnosis]:
        """Return diagnoses by rule, for rules that trip for the first time. If ranks objected, all of them take part.

        Args:
            reports: the reports of the rules that tripped on this rank, by rule.
            step: the number of the step.
            scale: the factor of a `GradScaler`.
            heard: the votes of the ranks on the step.
        """
        asked = {one.rule for one in heard.objections}.intersection(self._asked) - self._shared
        if heard.severity > OVERFLOWED and asked:
            self._shared |= asked
            self.pending -= asked
            # The ranks met for some rules before, at an update that this rank left out: no rank meets for those rules again.
            asked = {one for one in asked if heard.voter is not None and heard.voter.begins(one)}
            if not asked:
                return {}
            diagnosis = self._among_ranks(list(reports.values()), step, scale, heard, asked)
            return {} if diagnosis is None else dict.fromkeys(asked, diagnosis)
        diagnoses = {}
        for rule, report in reports.items():
            if rule in self.pending:
                self.pending.discard(rule)
                failed = self._failed(step, scale, [report])
                if (diagnosis := self._run(failed, [rule])) is not None:
                    diagnoses[rule] = diagnosis
        return diagnoses

    def _among_ranks(
        self,
        reports: Sequence[TrapReport],
        step: int,
        scale: Tensor | None,
        heard: Heard,
        rules: Collection[str],
    ) -> Diagnosis | None:
        """Run the calls of this rank again, and exchange diagnoses with the ranks that come to this update."""
        assert heard.voter is not None  # noqa: S101 # ranks have objected
        divided = self._divided()
        if divided is not None:
            told = heard.voter.meet(fully_shard.fits(divided), LIMIT)
            if absent := [rank for rank in heard.voter.ranks if rank not in told]:
                return self._unable(_ABSENT.format(ranks=_dist.named(absent)), step)
            if full := [rank for rank, fits in told.items() if not fits]:
                return self._unable(_NO_MEMORY.format(ranks=_dist.named(full)), step)
        own = self._own(reports, step, scale, rules, guilty=heard.guilty, divided=divided)
        return _most_telling(own, heard.voter.meet(own, LIMIT))

    def _divided(self) -> nn.Module | None:
        """Return the model if `fully_shard` divides it, so that ranks run it again together."""
        model, context = self._kept.model(), self._context
        groups = context.ranks.shard_groups(range(len(context.program.names)))
        return model if groups and model is not None and fully_shard.casts(model) else None

    def _unable(self, why: str, step: int) -> Diagnosis:
        return Diagnosis("not reproduced", (why,), step, _dist.rank())

    def _own(
        self,
        reports: Sequence[TrapReport],
        step: int,
        scale: Tensor | None,
        rules: Iterable[str],
        *,
        guilty: Sequence[int],
        divided: nn.Module | None,
    ) -> Diagnosis | None:
        """Run the calls of this rank again, with whole parameters if the model is divided."""
        if divided is not None:
            failed = self._failed(step, scale, reports, together=True)
            for call in failed.calls:
                if (module := call.module()) is not None:
                    call.casts = fully_shard.casts(module)
            return self._run(failed, rules, fully_shard.unsharded(divided))
        if not reports:
            return None
        if guilty and _dist.rank() not in guilty and all(report.reduced for report in reports):
            why = f"{_dist.named(guilty)} contributed NaN or Inf, and this rank did not"
            return self._unable(why, step)
        return self._run(self._failed(step, scale, reports), rules)

    def _failed(
        self,
        step: int,
        scale: Tensor | None,
        reports: Sequence[TrapReport],
        *,
        together: bool = False,
    ) -> FailedStep:
        kept, rules = self._kept, self._context.program.site_rules
        return FailedStep(
            tuple(kept.calls),
            kept.dropped,
            kept.passes,
            step,
            _dist.rank(),
            scale,
            tuple(name for report in reports for name in report.modules),
            tuple(sorted({rule.id for rule, _ in rules if isinstance(rule, EditRule)})),
            dict(kept.losses),
            kept.problem,
            tuple(name for report in reports for name in report.bad),
            together,
            kept.is_updated,
        )

    def _run(
        self,
        failed: FailedStep,
        rules: Iterable[str],
        around: AbstractContextManager[None] = nullcontext(),  # noqa: B008 # it holds nothing
    ) -> Diagnosis | None:
        context = self._context
        paused, context.paused = context.paused, True
        try:
            with context.parameters.lock, around:
                diagnosis = diagnose(failed)
                folder = self._folder(rules)
                return diagnosis if folder is None else with_bundle(diagnosis, failed, folder)
        except Exception as error:  # noqa: BLE001 # the decision of the trap stays
            text = f"the step could not be diagnosed: {type(error).__name__}: {error}"
            context.event_log.emit("notice", text, rule=next(iter(rules)), step=failed.step)
            return None
        finally:
            context.paused = paused
            if not self.pending:
                self._kept.detach()

    def _folder(self, rules: Iterable[str]) -> Path | None:
        """Return the folder for the bundle of a step, if one is wanted."""
        writer = self._context.recorder.writer
        if writer is not None and not writer.closed:
            return writer.path
        wanted = any(
            isinstance(decision := self._context.decisions[rule], Decision) and decision.bundle
            for rule in rules
        )
        return Path("gradsurgeon-traps") if wanted else None


def _most_telling(
    own: Diagnosis | None, others: Mapping[int, Diagnosis | None]
) -> Diagnosis | None:
    """Return the diagnosis of this rank if it blames an operation or tensor, else the first other one that does."""
    if own is not None and own.where:
        return own
    of_ranks = [other for _, other in sorted(others.items()) if other is not None]
    for other in of_ranks:
        if other.where:
            return other
    if own is None:
        return None
    reasons = dict.fromkeys(own.reasons)
    for other in of_ranks:
        new = [reason for reason in other.reasons if reason not in reasons]
        reasons |= dict.fromkeys(f"{reason} (rank {other.rank})" for reason in new)
    return replace(own, reasons=tuple(reasons))
