"""The effects of traps: they look at each update, and object to numbers that must not reach a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from gradsurgeon.actions import Decision
from gradsurgeon.errors import BindError, shorten_names
from gradsurgeon.runtime.effect import Bound, Effect, Findings
from gradsurgeon.runtime.flags import Flag
from gradsurgeon.runtime.origin import Origin
from gradsurgeon.runtime.scaler_watch import unscaled
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.trap_report import (
    TrapReport,
    activation_report,
    spelled,
    threshold_report,
)
from gradsurgeon.runtime.update import Judged, JudgedUpdate
from gradsurgeon.tensors import _dist, _nonfinite, measure
from gradsurgeon.tensors.measure import Norms, read_marks
from gradsurgeon.tensors.sent_norms import is_any_nonfinite
from gradsurgeon.tensors.statistics import columns_of

# The statistic of `nan-trap`. It costs nothing extra: norms that are measured anyway show NaN and Inf.
NONFINITE = "nonfinite"
_SEVERAL = "is several numbers, and a trap judges one: use another statistic, such as `l2`, or `norm-log` to record it"
_ENGINE_DECIDES = "the engine decides whether the update takes place (`then: warn`)"
_REPAIRED = "{number} gradients were non-finite after backward and finite at the update ({names}): repaired, no trap"
_IN_VAIN = "the {what} of {name} was non-finite (elements: {count}) in a forward pass that fed no update: the trap ignored it"
_ONLY_NONFINITE = "rule {rule}: a trap on modules and tags checks for non-finite elements alone, not `{statistic}`; use `params`"
# Bounds the flags that a long validation between two updates collects.
_MOST_FLAGS = 4096


class Trap(Effect):
    """Decides on updates."""

    judges = True

    def prepare(self) -> None:
        statistic = self.compiled.statistic
        if len(columns_of(statistic)) > 1:
            raise BindError([f"rule {self.rule.id}: {statistic} {_SEVERAL}"])

    @property
    def then(self) -> str:  # type: ignore[override] # may change once: `soften`
        then: str = self.compiled.then
        return then

    def soften(self) -> None:
        """Only warn from now on."""
        self.compiled = replace(self.compiled, then="warn", give_up_after="never")


class NonfiniteTrap(Trap):
    """Objects to gradients with non-finite elements."""

    searches = True
    votes = True
    defers = True

    def look(self, update: JudgedUpdate, bound: Bound) -> Norms:
        if not update.gradients.having(bound.indices):
            return ()
        return update.norms

    def objection(self, update: Judged, bound: Bound, norms: Norms) -> Tensor:  # noqa: ARG002 # they may overflow
        return is_any_nonfinite(measure.among(update.magnitudes, bound.indices))

    def judge(self, update: Judged, bound: Bound, doubtful: Sequence[int]) -> TrapReport | None:
        update.find(doubtful)
        if update.concerns(bound.indices):
            report = update.report(self.context.names)
            engine = self.context.parameters.elsewhere
            if engine is not None and engine.may_leave_out:
                return replace(report, goes_on=_ENGINE_DECIDES)
            return report
        self._mention_repaired(update, bound)
        return None

    def _mention_repaired(self, update: Judged, bound: Bound) -> None:
        rule = self.rule.id
        repaired = [index for index in bound.indices if index in update.repaired]
        names = self.context.names_of(repaired)
        objecting = [objection.rule for objection in update.heard.objections]
        if names and (update.heard.unanimous or rule not in objecting):
            text = _REPAIRED.format(number=len(names), names=shorten_names(names))
            self.emit("notice", text, step=update.step, name=names[0])


class ThresholdTrap(Trap):
    """Objects to gradients by a statistic of each: the trap of an action that a user writes."""

    measures = True
    compiled: Decision

    def look(self, update: JudgedUpdate, bound: Bound) -> Norms:
        indices = update.gradients.having(bound.indices)
        if not indices:
            return ()
        values = update.gradients.statistics(self.compiled.statistic, indices)
        # A non-finite number marks a tensor that trips.
        flags = values.new_zeros(len(values)).masked_fill(self.compiled.trips(values), math.inf)
        return ((tuple(indices), flags),)

    def judge(self, update: Judged, bound: Bound, doubtful: Sequence[int]) -> TrapReport | None:
        assert isinstance(update, JudgedUpdate)  # noqa: S101 # the host decides
        statistic = self.compiled.statistic
        indices = update.gradients.having(bound.indices)
        values = update.gradients.statistics(statistic, indices).tolist()
        names = self.context.names_of(indices)
        tripped = [index in doubtful for index in indices]
        return threshold_report(statistic, names, values, tripped)


class TensorTrap(Trap):
    """Objects to tensors of modules and tags with non-finite elements."""

    votes = True

    compiled: Decision

    def prepare(self) -> None:
        super().prepare()
        statistic = self.compiled.statistic
        if statistic != NONFINITE:
            text = _ONLY_NONFINITE.format(rule=self.rule.id, statistic=statistic)
            raise BindError([text])
        # The flags since the last update, in the order in which their tensors appeared.
        self._flags: list[Flag] = []
        # The latest flag of a forward pass, by tensor.
        self._last: dict[str, Flag] = {}

    def on_tensor(self, tensor: Tensor, origin: Origin) -> Tensor:
        if not origin.is_again:
            self._add(self._flag(tensor, origin, is_fed=origin.is_gradient))
            self.count_fired(origin.step)
        elif not origin.is_gradient and not self._is_known(origin.name):
            self._add(self._flag(tensor, origin, is_fed=True))
        return tensor

    def _flag(self, tensor: Tensor, origin: Origin, *, is_fed: bool) -> Flag:
        true = unscaled(tensor, origin.scale)
        count = _nonfinite.nonfinite_mark(_dist.local(true))
        flag = Flag(str(self.rule.ref), origin.name, origin.counter, count, fed=is_fed)
        flag.follow(tensor)
        if not origin.is_again:
            self._last[flag.name] = flag
        return flag

    def _is_known(self, name: str) -> bool:
        """Return whether the original run of a recomputed forward pass left a flag that can feed an update."""
        # Reentrant checkpointing runs the forward pass without gradients first: such flags can feed none.
        last = self._last.get(name)
        return last is not None and last.could_feed

    def _add(self, flag: Flag) -> None:
        self._flags.append(flag)
        # A model may have more modules, so all of them may still feed an update.
        if len(self._flags) % _MOST_FLAGS == 0:
            self._mention(self._taken(lambda flag: not (flag.fed or flag.can_feed)))

    def note_pass(self) -> None:
        """Note a backward pass: the forward pass before it feeds an update."""
        for flag in self._flags:
            flag.fed |= flag.waits

    def peek(self, counters: Sequence[StepCounter]) -> TrapReport | None:
        """Report on the flags that the next update must judge."""
        flags = [flag for flag in self._flags if flag.fed and flag.counter() in counters]
        return activation_report(_counted(flags))

    def findings(self, counters: Sequence[StepCounter]) -> Findings:
        """Judge the flags that feed an update, if there are any, and forget them. Reads the device once."""
        self._last.clear()
        counted = self._taken(lambda flag: flag.counter() in counters)
        fed = [(flag, count) for flag, count in counted if flag.fed]
        report = activation_report(fed)
        trapped = () if report is None else report.modules
        ignored = []
        for flag, count in counted:
            is_reported = flag.fed or flag.name in trapped
            if not is_reported:
                ignored.append((flag, count))
        self._mention(ignored)
        return {self: report} if fed else {}

    def forget(self, counters: Sequence[StepCounter]) -> None:
        self._flags = [flag for flag in self._flags if flag.counter() not in counters]

    def mention_all(self) -> None:
        self._mention(self._taken(lambda _: True))

    def _taken(self, is_wanted: Callable[[Flag], bool]) -> list[tuple[Flag, int]]:
        wanted: list[Flag] = []
        others: list[Flag] = []
        for flag in self._flags:
            target = wanted if is_wanted(flag) else others
            target.append(flag)
        self._flags = others
        return _counted(wanted)

    def _mention(self, dropped: Iterable[tuple[Flag, int]]) -> None:
        for flag, count in dropped:
            if count:
                text = _IN_VAIN.format(what=flag.what, name=flag.name, count=spelled(count))
                step = flag.counter().step
                self.emit("notice", text, step=step, name=flag.name)


def _counted(flags: Sequence[Flag]) -> list[tuple[Flag, int]]:
    unread = [flag.count for flag in flags if isinstance(flag.count, Tensor)]
    read_counts = iter(read_marks(unread))
    counted = []
    for flag in flags:
        count = next(read_counts) if isinstance(flag.count, Tensor) else flag.count
        counted.append((flag, count))
    return counted
