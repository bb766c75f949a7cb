"""What the traps know of one update, and what they say about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gradsurgeon.actions.nan_trap import NanTrap
from gradsurgeon.errors import NonFiniteGradientError, printable
from gradsurgeon.runtime.agreement import FINE, RAISE, SKIP
from gradsurgeon.runtime.border import Border, Finding, window
from gradsurgeon.runtime.flags import Flag
from gradsurgeon.runtime.look import Look
from gradsurgeon.runtime.measure import Count, Norms, as_dict
from gradsurgeon.runtime.ranks import Word
from gradsurgeon.runtime.state import Mode


@dataclass(slots=True)
class Verdict:
    """What the traps say about one update."""

    skip: bool = False
    error: NonFiniteGradientError | None = None
    # Parameters that a `freeze` rule hides from the optimizer in this step.
    frozen: tuple[int, ...] = ()
    # What led to it, for ranks that have seen nothing.
    word: Word | None = None
    # Where the device has the last word: whether to skip, to be told to the optimizer.
    flag: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What a decision rests on.

    Attributes:
        before: tensors that were certainly non-finite at the last look after backward.
        now: tensors that are at the update, with what kind and how many elements, counted exactly.
        fresh: the norms at the update.
        unchanged: they are what they were at that look.
    """

    before: frozenset[int]
    now: dict[int, Count]
    fresh: Norms = ()
    unchanged: bool = False


@dataclass(frozen=True, slots=True)
class Trip:
    """A trap that has tripped, before the ranks have said which of them had a part in it.

    Attributes:
        rule: the trap.
        step: the update that it holds up.
        in_a_row: how often it has tripped in a row.
        finding: what there is to say, once it is known which ranks contributed what is not finite.
        guilty: whether this rank contributed what is not finite to an average.
    """

    rule: NanTrap
    step: int
    in_a_row: int
    finding: Callable[[tuple[int, ...]], Finding]
    guilty: bool = False

    @property
    def then(self) -> str:
        """What becomes of the step."""
        return "raise" if self.in_a_row >= self.rule.give_up_after else self.rule.then

    @property
    def severity(self) -> int:
        """How bad it is for the step."""
        return {"raise": RAISE, "skip-step": SKIP, "warn": FINE}[self.then]


@dataclass(slots=True)
class Watch:
    """The looks of the current step of one clock, and how often each trap tripped in a row."""

    looks: list[Look] = field(default_factory=list)
    in_a_row: dict[str, int] = field(default_factory=dict)
    scaled_away: int = 0

    def tripped(
        self,
        rule: NanTrap,
        step: int,
        finding: Callable[[tuple[int, ...]], Finding],
        *,
        guilty: bool = False,
    ) -> Trip:
        """Count that a trap has tripped once more, and return what there is to tell of it."""
        self.in_a_row[rule.id] = self.in_a_row.get(rule.id, 0) + 1
        return Trip(rule, step, self.in_a_row[rule.id], finding, guilty)


def is_guilty(looks: Sequence[Look], seen: Seen) -> bool:
    """Tell whether this rank's share of an average was not finite.

    Only the last pass is asked, which is the one that reduced. A rank whose part of the model was not
    used has no look at all, and got its gradients from the others.
    """
    if not looks or not looks[-1].averaged:
        return False
    own = looks[-1].own
    bad = [own[tensor] for tensor in seen.before.union(seen.now) if tensor in own]
    return any(not bool(norm.isfinite()) for norm in bad)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What there is to say of gradients that are not finite.

    Attributes:
        names: of all tensors.
        looks: those of the step.
        seen: what was and is not finite.
        tensors: those that were judged.
        why: what the first line begins with.
    """

    names: Sequence[str]
    looks: Sequence[Look]
    seen: Seen
    tensors: Sequence[int]
    why: str = ""

    def finding(self, ranks: tuple[int, ...]) -> Finding:
        """Tell of the border as the first look of the step saw it, else as it was at the update.

        Args:
            ranks: those that contributed what is not finite to an average.
        """
        return self._border(ranks).finding(self.names, self.why)

    def _border(self, ranks: tuple[int, ...]) -> Border:
        looks = self.looks
        for number, look in enumerate(looks, 1):
            if bad := self._bad(look):
                many = len(looks) > 1
                passes = f", micro-batch {number} of {len(looks)}" if many else ""
                # Some may have kept a gradient from an earlier pass and got nothing in this one.
                rest = tuple(tensor for tensor in look.tensors if tensor not in look.order)
                order = (*look.order, *rest)
                return Border(f"after backward{passes}", order, bad, as_dict(look.norms), ranks)
        order = looks[-1].order if looks else ()
        rest = tuple(tensor for tensor in self.tensors if tensor not in order)
        moment = "right before the update, and finite after backward: something in between did it"
        if not looks:
            moment = "right before the update"
        return Border(moment, (*order, *rest), self.seen.now, self._norms(), ranks)

    def _bad(self, look: Look) -> dict[int, Count]:
        if look.counts is not None:
            return look.counts
        # What was seen on a device can be counted only where the script has not clipped since.
        norms, seen = as_dict(look.norms), self.seen
        known = seen.now if seen.unchanged else {}
        return {
            tensor: known.get(tensor, Count("NaN" if math.isnan(norms[tensor]) else "Inf", 0))
            for tensor in norms
            if not math.isfinite(norms[tensor]) and tensor in seen.before
        }

    def _norms(self) -> dict[int, float]:
        """Return what is known; none is taken, which other ranks would have to take as well."""
        return as_dict(self.seen.fresh)


def certainly_bad(looks: Sequence[Look], now: Mapping[int, Count]) -> frozenset[int]:
    """Return the tensors that were non-finite at the last look.

    A norm of a device can overflow over elements that are finite; NaN it becomes only by what is not.
    """
    if not looks:
        return frozenset()
    last = looks[-1]
    if last.counts is not None:
        return frozenset(last.counts)
    norms = as_dict(last.norms).items()
    return frozenset(i for i, n in norms if math.isnan(n) or (math.isinf(n) and i in now))


def finite(norms: Norms) -> dict[int, float | None]:
    """Return norms by tensor, none for what is not finite, so that they can be compared."""
    return {i: norm if math.isfinite(norm) else None for i, norm in as_dict(norms).items()}


def finding_of_flags(flags: Sequence[tuple[Flag, int]], ranks: tuple[int, ...]) -> Finding:
    """Tell of module tensors and tags, in the order in which they came, and how many elements are bad."""
    del ranks  # each has seen its own
    bad = [place for place, (_, count) in enumerate(flags) if count]
    rows = [
        f"  > non-finite  the {flag.what} of {printable(flag.name)}  {count:,} elements"
        if count
        else f"    finite      the {flag.what} of {printable(flag.name)}"
        for flag, count in flags
    ]
    first = flags[bad[0]][0]
    head = f"{len(bad)} of {len(flags)} tensors are not finite"
    last = f"the first that is not finite is the {first.what} of {printable(first.name)}"
    lines = ["in the order in which they came:", *window(rows, bad[0]), last]
    return Finding(first.name, head, lines)


def outcome(rule: NanTrap, mode: Mode, then: str, in_a_row: int) -> str:
    """Return what becomes of a step in which a trap has tripped."""
    if mode == "observe":
        return f"observing only: `then: {rule.then}` would have acted"
    if then != rule.then:
        return f"giving up: tripped {in_a_row} times in a row (give_up_after: {rule.give_up_after})"
    return {
        "raise": "stopped before the update: no weight was moved",
        "skip-step": "step skipped: no weight and no optimizer state was touched",
        "warn": "the update goes on (`then: warn`): expect non-finite weights",
    }[then]
