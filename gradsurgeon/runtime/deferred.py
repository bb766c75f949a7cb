"""Skipping a step without asking the host: the optimizer reads a flag, the report follows.

Fused optimizers leave weights and state alone where a flag on the device says so. What the flag was
made of waits on the device, and is read when it has come to the host anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.actions.nan_trap import NanTrap
from gradsurgeon.errors import NonFiniteGradientError
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.agenda import Agenda, Lane
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.look import Look
from gradsurgeon.runtime.measure import Count
from gradsurgeon.runtime.ring import Ring
from gradsurgeon.runtime.state import State

# Updates whose flags travel together. Ranks must stop at the same update, so that a number of updates
# and no clock on the wall decides when an error is due.
_EVERY = 16
# The largest element of others may not fit in float32.
_KINDS = {torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One update that the device has decided on, as far as the host knew it.

    Attributes:
        number: of all such updates of the session.
        clock: of the optimizer.
        step: what the clock said.
        lanes: the traps that were due.
        tensors: the trapped ones that had a gradient.
        looks: what was seen after each backward pass; the norms are yet to come.
    """

    number: int
    clock: Clock
    step: int
    lanes: tuple[Lane, ...]
    tensors: tuple[int, ...]
    looks: tuple[Look, ...]

    def looks_with(self, numbers: Iterator[float]) -> list[Look]:
        """Return the looks with the norms that belong to them, which ``numbers`` begins with."""
        return [self._filled(look, numbers) for look in self.looks]

    @staticmethod
    def _filled(look: Look, numbers: Iterator[float]) -> Look:
        norms = torch.tensor(list(islice(numbers, len(look.tensors))), device="cpu")
        own = {tensor: torch.tensor(next(numbers), device="cpu") for tensor in look.own}
        return Look(
            look.arrived,
            look.tensors,
            ((look.tensors, norms),),
            averaged=look.averaged,
            own=own,
        )

    def bad(self, numbers: Iterator[float]) -> dict[int, Count]:
        """Return what was not finite at the update, from the largest elements."""
        worst = zip(self.tensors, islice(numbers, len(self.tensors)), strict=True)
        return {
            tensor: Count("NaN" if math.isnan(number) else "Inf", 0)
            for tensor, number in worst
            if not math.isfinite(number)
        }


Report = Callable[[Case, list[float]], NonFiniteGradientError | None]


class Deferred:
    """The updates of a session that the device decides on.

    Args:
        state: what the parts of a session share.
        report: told of each, in order, once its numbers are there; returns the error that is due.
    """

    def __init__(self, state: State, report: Report) -> None:
        self._state = state
        self._report = report
        self._ring: Ring[Case] = Ring(self._take)
        self._count = 0
        self._error: tuple[int, NonFiniteGradientError] | None = None

    def can_judge(self, agenda: Agenda, grads: Sequence[Tensor], looks: Sequence[Look]) -> bool:
        """Tell whether nobody on the host has to know what becomes of an update."""
        state = self._state
        if state.mode != "act" or not grads or _torch.is_host(grads[0]):
            return False
        rules = [cast("NanTrap", lane.rule) for lane in agenda.traps]
        if any(rule.then != "skip-step" for rule in rules):
            return False
        # They count on the host, and decide there.
        program = state.program
        if any(rule.role == "trap" for rule, _ in program.site_rules):
            return False
        if agenda.frozen or any(lane.rule.may_overflow for lane in agenda.at_step):
            return False
        devices = {values.device for look in looks for _, values in look.norms}
        return (
            not _dist.any_sharded(grads)
            and devices | {grad.device for grad in grads} == {grads[0].device}
            and all(grad.dtype in _KINDS and grad.layout == torch.strided for grad in grads)
        )

    def judge(
        self,
        clock: Clock,
        lanes: tuple[Lane, ...],
        seen: tuple[Sequence[int], Sequence[Tensor]],
        looks: Sequence[Look],
    ) -> Tensor:
        """Return the flag that tells the optimizer to skip: 0-dim float32, on the device."""
        tensors, grads = seen
        # Not of norms, which overflow over elements that are finite.
        worst = measure.norms(tensors, grads, math.inf)[0][1]
        parts = [
            part
            for look in looks
            for part in (*(values for _, values in look.norms), *look.own.values())
        ]
        kept = tuple(
            Look(
                tuple(look.arrived),
                look.tensors,
                (),
                averaged=look.averaged,
                own=dict.fromkeys(look.own, _NONE),
            )
            for look in looks
        )
        with torch.no_grad():
            row = torch.cat([*[part.reshape(-1).float() for part in parts], worst])
            self._count += 1
            case = Case(self._count, clock, clock.step, lanes, tuple(tensors), kept)
            self._ring.put(case, row)
            return worst.isfinite().logical_not_().any().to(torch.float32)

    def due(self) -> NonFiniteGradientError | None:
        """Return the error that an update before has led to, where it is time to raise it."""
        if self._count % _EVERY == 0:
            self._ring.send()
        self._ring.collect()
        return self._pop()

    def settle(self, *, wait: bool = True) -> None:
        """Report all that is not reported yet; without waiting, what the device has told so far."""
        if wait:
            self._ring.settle()
        else:
            self._ring.send()

    def settled(self) -> NonFiniteGradientError | None:
        """Report everything, right before an update that the host decides on; return what is due."""
        self._ring.settle()
        return self._pop()

    def _pop(self) -> NonFiniteGradientError | None:
        found, self._error = self._error, None
        return None if found is None else found[1]

    def _take(self, rows: Sequence[tuple[Case, Tensor]]) -> None:
        for case, values in rows:
            error = self._report(case, values.tolist())
            if error is not None and self._error is None:
                self._error = (case.number, error)


_NONE = torch.empty(0, device="cpu")
