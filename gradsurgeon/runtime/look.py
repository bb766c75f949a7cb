"""The look after a backward pass: one batched reduction serves every rule that watches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.actions import CaptureRule, ObserverRule
from gradsurgeon.runtime.agenda import Agenda, Lane
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.measure import Count, Norms, counts, norms, pick, statistics, suspects
from gradsurgeon.runtime.scaling import unscaled
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.training_events import Pass


@dataclass(slots=True)
class Look:
    """What was seen of the gradients of one clock after one backward pass.

    Attributes:
        arrived: the tensors in the order in which backward delivered them, others than the watched
            ones and repetitions included.
        tensors: those of the tensors whose norm somebody reads that had a gradient, ascending.
        norms: their 2-norms, float32; one tensor per device, with the positions it covers.
        counts: exact numbers of non-finite elements, where looking was free (on the host).
        averaged: whether an average over ranks followed the pass.
        own: norms of what this rank alone contributed to it.
    """

    arrived: Sequence[int]
    tensors: tuple[int, ...]
    norms: Norms
    counts: dict[int, Count] | None = None
    averaged: bool = False
    own: dict[int, Tensor] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, ...]:
        """The tensors in the order in which backward delivered them."""
        normed = set(self.tensors)
        # A tensor can receive its gradient twice in one pass (reentrant checkpointing).
        return tuple(dict.fromkeys(tensor for tensor in self.arrived if tensor in normed))


def after_pass(state: State, done: Pass) -> dict[Clock, Look]:
    """Record what the rules at `accumulated` ask for; return what was seen, per clock."""
    _log_contributions(state, done)
    looks: dict[Clock, Look] = {}
    for clock in state.clocks.among(done.order):
        agenda = state.agenda(clock)
        tensors, grads = state.targets.grads(agenda.watched)
        if not tensors:
            continue
        by_tensor = dict(zip(tensors, grads, strict=True))
        look = _look(done, agenda, by_tensor)
        for lane in agenda.after:
            if isinstance(lane.rule, ObserverRule):
                _log(state, lane, look, by_tensor, done.scale)
            elif isinstance(lane.rule, CaptureRule):
                keep(state, lane, by_tensor, done.scale)
        look.averaged = state.ranks.averaging
        looks[clock] = look
    return looks


def _look(done: Pass, agenda: Agenda, grads: dict[int, Tensor]) -> Look:
    tensors = [tensor for tensor in agenda.normed if tensor in grads]
    found = norms(tensors, [grads[tensor] for tensor in tensors], scale=done.scale)
    look = Look(done.order, tuple(tensors), found, own=done.own)
    if agenda.traps and all(_torch.is_host(values) for _, values in found):
        # On the host a look is free, and an exact one now is worth more than one after the script
        # has clipped. On a device it would be a wait.
        bad = set(suspects(found)).intersection(agenda.trapped)
        look.counts = counts({tensor: grads[tensor] for tensor in sorted(bad)})
    return look


def keep(state: State, lane: Lane, grads: dict[int, Tensor], scale: Tensor | None) -> None:
    """Keep copies of the gradients that a `capture` rule matched, in true units."""
    for tensor in lane.tensors:
        if tensor in grads:
            name = state.program.names[tensor]
            true = _dist.whole(unscaled(grads[tensor], scale))
            state.captures.keep(lane.rule, name, lane.clock.step, true)


def _log(
    state: State, lane: Lane, look: Look, grads: dict[int, Tensor], scale: Tensor | None
) -> None:
    found: Sequence[int] = lane.tensors
    if look.tensors != lane.tensors:
        found = [tensor for tensor in lane.tensors if tensor in grads]
    if not found:
        return
    columns = lane.columns(found)
    for stat, key in lane.keys.items():
        if stat == "l2":
            values = pick(look.norms, found)
        else:
            with torch.no_grad():
                values = statistics(stat, [unscaled(grads[tensor], scale) for tensor in found])
        state.recorder.add(key, lane.clock.step, columns, values, replace=True)
    state.journal.fired(lane.rule.id, lane.clock.step, len(found))


def _log_contributions(state: State, done: Pass) -> None:
    """Write the rows of `norm-log` rules at `backward`, one per pass."""
    for rule_id, rows in done.logged.items():
        for clock in state.clocks.among(sorted(rows)):
            lane = state.lane(rule_id, clock)
            tensors = [tensor for tensor in lane.tensors if tensor in rows]
            columns = lane.columns(tensors)
            for stat, key in lane.keys.items():
                values = _stack([rows[tensor][stat] for tensor in tensors])
                state.recorder.add(key, clock.step, columns, values, replace=False)


def _stack(values: Sequence[Tensor]) -> Tensor:
    """Stack 0-dim statistics, on the host where they come from several devices."""
    if len({value.device for value in values}) > 1:
        values = [value.cpu() for value in values]
    return torch.stack(list(values))
