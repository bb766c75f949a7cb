"""Checks that look at each optimizer by itself, and how often in a row something was so."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gradsurgeon.actions.checks.base import Check, Findings, Pass, Update


class Streak:
    """Counts how often in a row something was so."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.count = 0

    def reaches(self, is_so: object) -> bool:
        """Count once more, or from 0; tell whether it has just been so as often as wanted."""
        self.count += 1
        if not is_so:
            self.count = 0
        return self.count == self._wanted


@dataclass(eq=False)
class TrackedOptimizer:
    """An optimizer as its checks know it.

    Attributes:
        updates: its updates so far.
        indices: its parameters, as of its last update that was looked at.
        sampled: a few of them.
        others: the other optimizers that have updated before.
        used: by parameter that it sampled, places of the gradient that its last update used, and the values there.
        moved: its parameters that have moved: a schedule, or a minimum, may bring them to rest.
        explained: its parameters whose gradients are 0 for a known reason.
        checks: its checks.
        looks: whether these look at its next update, and at the passes before it.
    """

    updates: int = 0
    indices: Sequence[int] = ()
    sampled: Sequence[int] = ()
    others: Sequence[TrackedOptimizer] = ()
    used: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    explained: set[int] = field(default_factory=set)
    checks: Sequence[OptimizerCheck] = ()
    looks: bool = True

    @property
    def shared(self) -> set[int]:
        """Its parameters that another optimizer has as well."""
        return set().union(*[other.indices for other in self.others]).intersection(self.indices)


class OptimizerCheck(Check):
    """A check of one optimizer: it sees all passes, and the updates of that optimizer."""

    owner: TrackedOptimizer

    @property
    def waits_for(self) -> str:
        """The method in which it sees something soon, of those that `rests` is asked about."""
        return ""


class Checks(Check):
    """Several checks of one rule: some of the whole training, and some of each optimizer."""

    def __init__(self, checks: Sequence[Check], *kinds: type[OptimizerCheck]) -> None:
        self.checks = checks
        self.kinds = kinds
        self.owners: dict[Hashable, TrackedOptimizer] = {}

    def owner_of(self, update: Update) -> TrackedOptimizer:
        """Return the optimizer of an update, with checks of its own."""
        if update.owner not in self.owners:
            tracked = TrackedOptimizer()
            tracked.checks = [kind() for kind in self.kinds]
            for check in tracked.checks:
                check.owner = tracked
            self.owners[update.owner] = tracked
        return self.owners[update.owner]

    def before_pass(self, starting: Pass) -> Findings:
        for check in self._looking(self.owners.values()):
            yield from check.before_pass(starting)

    def after_pass(self, done: Pass) -> Findings:
        for check in self._looking(self.owners.values()):
            yield from check.after_pass(done)

    def before_update(self, update: Update) -> Findings:
        for check in self._looking([self.owner_of(update)]):
            yield from check.before_update(update)

    def after_update(self, update: Update) -> Findings:
        owner = self.owner_of(update)
        for check in self._looking([owner]):
            yield from check.after_update(update)
        owner.updates += 1

    def close(self) -> None:
        for owner in self.owners.values():
            for check in owner.checks:
                check.close()

    def at_end(self) -> Findings:
        for check in self.checks:
            yield from check.at_end()

    def _looking(self, owners: Iterable[TrackedOptimizer]) -> list[Check]:
        checks = [*self.checks]
        for owner in owners:
            if owner.looks:
                checks += owner.checks
        return checks
