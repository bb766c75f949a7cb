"""What was seen of the gradients of one update: after each backward pass, and right before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gradsurgeon.runtime.border import Border
from gradsurgeon.runtime.look import Look
from gradsurgeon.runtime.measure import Count, Norms, as_dict


@dataclass(frozen=True)
class Evidence:
    """What was seen of the gradients of one update.

    Attributes:
        looks: what was seen after each backward pass of the step.
        tensors: those that are judged.
        now: those of them that are not finite at the update.
        norms: at the update, as far as they were taken. None is taken for a report: other ranks would
            have to take part.
    """

    looks: Sequence[Look]
    tensors: Sequence[int]
    now: dict[int, Count]
    norms: Norms = ()

    @cached_property
    def before(self) -> frozenset[int]:
        """The tensors that were certainly non-finite after the last backward pass."""
        if not self.looks:
            return frozenset()
        last = self.looks[-1]
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
        if not self.looks or not self.looks[-1].averaged:
            return False
        contributed = self.looks[-1].own
        return any(
            not bool(contributed[tensor].isfinite())
            for tensor in self.before.union(self.now)
            if tensor in contributed
        )

    def border(self) -> Border:
        """Return the border as it was after the first pass that shows one, else at the update."""
        for number, look in enumerate(self.looks, 1):
            if bad := self._nonfinite(look):
                passes = f", micro-batch {number} of {len(self.looks)}"
                moment = "after backward" + (passes if len(self.looks) > 1 else "")
                # Some may have kept a gradient from an earlier pass and got nothing in this one.
                order = tuple(dict.fromkeys((*look.order, *look.tensors)))
                return Border(moment, order, bad, as_dict(look.norms))
        moment = "right before the update"
        arrived = self.looks[-1].order if self.looks else ()
        if self.looks:
            moment += ", and finite after backward: something in between did it"
        order = tuple(dict.fromkeys((*arrived, *self.tensors)))
        return Border(moment, order, self.now, as_dict(self.norms))

    def _nonfinite(self, look: Look) -> dict[int, Count]:
        if look.counts is not None:
            return look.counts
        # What was seen on a device can be counted only where the script has not clipped since.
        known = self.now if _finite(self.looks[-1].norms) == _finite(self.norms) else {}
        return {
            tensor: known.get(tensor, uncounted(norm))
            for tensor, norm in as_dict(look.norms).items()
            if not math.isfinite(norm) and tensor in self.before
        }


def uncounted(number: float) -> Count:
    """Return what is known of a gradient from a number that is not finite."""
    return Count("NaN" if math.isnan(number) else "Inf", 0)


def _finite(norms: Norms) -> dict[int, float | None]:
    """Return norms by tensor, none for what is not finite, so that they can be compared."""
    return {i: norm if math.isfinite(norm) else None for i, norm in as_dict(norms).items()}
