"""What was seen of the gradients of one update: after each backward pass, and right before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gradsurgeon.runtime.accumulated_rules import GradientSnapshot
from gradsurgeon.runtime.measure import NonfiniteCount, Norms, as_dict
from gradsurgeon.runtime.nonfinite_report import GradientReport
from gradsurgeon.runtime.parameters import Parameters


@dataclass(frozen=True)
class GradientEvidence:
    """What was seen of the gradients of one update.

    Attributes:
        snapshots: what was seen after each backward pass of the step.
        tensors: those that are judged.
        now: those of them that are not finite at the update.
        norms: at the update, as far as they were taken. None is taken for a report: other ranks would
            have to take part.
    """

    snapshots: Sequence[GradientSnapshot]
    tensors: Sequence[int]
    now: dict[int, NonfiniteCount]
    norms: Norms = ()

    @cached_property
    def before(self) -> frozenset[int]:
        """The tensors that were certainly non-finite after the last backward pass."""
        if not self.snapshots:
            return frozenset()
        last = self.snapshots[-1]
        if last.counts is not None:
            return frozenset(last.counts)
        # A norm of a device can overflow over elements that are finite; NaN it becomes only by what is not.
        return frozenset(
            tensor
            for tensor, norm in as_dict(last.norms).items()
            if math.isnan(norm) or (math.isinf(norm) and tensor in self.now)
        )

    @cached_property
    def repaired(self) -> frozenset[int]:
        """The tensors that were non-finite after the last backward pass and are finite at the update."""
        return self.before.intersection(self.tensors).difference(self.now)

    @property
    def guilty(self) -> bool:
        """Whether this rank contributed what is not finite to an average.

        Only the last pass is asked, which is the one that reduced. A rank whose part of the model was not
        used has seen nothing, and got its gradients from the others.
        """
        if not self.snapshots or not self.snapshots[-1].done.averaged:
            return False
        contributed = self.snapshots[-1].done.contributed
        return any(
            not bool(contributed[tensor].isfinite())
            for tensor in self.before.union(self.now)
            if tensor in contributed
        )

    def border(self, params: Parameters) -> GradientReport:
        """Return the border as it was after the first pass that shows one, else at the update."""
        for number, snapshot in enumerate(self.snapshots, 1):
            if bad := self._nonfinite(snapshot):
                passes = f", micro-batch {number} of {len(self.snapshots)}"
                moment = "after backward" + (passes if len(self.snapshots) > 1 else "")
                # Some may have kept a gradient from an earlier pass and got nothing in this one.
                order = tuple(dict.fromkeys((*snapshot.order(params), *snapshot.tensors)))
                return GradientReport(moment, order, bad, as_dict(snapshot.norms))
        moment = "right before the update"
        arrived = self.snapshots[-1].order(params) if self.snapshots else ()
        if self.snapshots:
            moment += ", and finite after backward: something in between did it"
        order = tuple(dict.fromkeys((*arrived, *self.tensors)))
        return GradientReport(moment, order, self.now, as_dict(self.norms))

    def _nonfinite(self, snapshot: GradientSnapshot) -> dict[int, NonfiniteCount]:
        if snapshot.counts is not None:
            return snapshot.counts
        # What was seen on a device can be counted only where the script has not clipped since.
        known = self.now if _finite(self.snapshots[-1].norms) == _finite(self.norms) else {}
        return {
            tensor: known.get(tensor, uncounted(norm))
            for tensor, norm in as_dict(snapshot.norms).items()
            if not math.isfinite(norm) and tensor in self.before
        }


def uncounted(number: float) -> NonfiniteCount:
    """Return what is known of a gradient from a number that is not finite."""
    return NonfiniteCount("NaN" if math.isnan(number) else "Inf", 0)


def _finite(norms: Norms) -> dict[int, float | None]:
    """Return norms by tensor, none for what is not finite, so that they can be compared."""
    return {i: norm if math.isfinite(norm) else None for i, norm in as_dict(norms).items()}
