"""The look after a backward pass: one batched reduction serves every rule that watches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.measure import Count, Norms, counts, norms, pick, statistics, suspects
from gradsurgeon.runtime.passes import Pass
from gradsurgeon.runtime.scaling import unscaled
from gradsurgeon.runtime.state import Lane, State
from gradsurgeon.runtime.targets import Mark, mark


@dataclass(slots=True)
class Look:
    """What was seen of the gradients of one clock after one backward pass.

    Attributes:
        order: the tensors in the order in which backward delivered them, watched ones only.
        tensors: the tensors that had a gradient, ascending.
        norms: their 2-norms, float32; one tensor per device, with the positions it covers.
        marks: what tells whether a gradient has changed since.
        counts: exact numbers of non-finite elements, where looking was free (on the host).
        averaged: whether an average over ranks followed the pass.
        own: norms of what this rank alone contributed to it.
    """

    order: tuple[int, ...]
    tensors: tuple[int, ...]
    norms: Norms
    marks: dict[int, Mark]
    counts: dict[int, Count] | None = None
    averaged: bool = False
    own: dict[int, Tensor] = field(default_factory=dict)


def after_pass(state: State, done: Pass) -> dict[Clock, Look]:
    """Record what the rules at `accumulated` ask for; return what was seen, per clock."""
    _log_contributions(state, done)
    looks: dict[Clock, Look] = {}
    clocks = {id(clock): clock for clock in (state.clocks[tensor] for tensor in done.order)}
    for clock in clocks.values():
        lanes = [
            lane
            for stage in state.program.after_backward
            for lane in state.lanes(stage)
            if lane.clock is clock and lane.rule.steps.due(clock.step)
        ]
        if not lanes:
            continue
        watched = sorted({tensor for lane in lanes for tensor in lane.tensors})
        tensors, grads = state.targets.grads(watched)
        if not tensors:
            continue
        trapped = any(lane.rule.role == "trap" for lane in lanes)
        look = _look(done, tensors, grads, scale=state.scaling.scale, exact=trapped)
        by_tensor = dict(zip(tensors, grads, strict=True))
        for lane in lanes:
            if lane.rule.role == "observe":
                _log(state, lane, look, by_tensor)
            elif lane.rule.role == "capture":
                keep(state, lane, by_tensor, state.scaling.scale)
        look.averaged = state.ranks.averaging
        looks[clock] = look
    return looks


def _look(
    done: Pass, tensors: list[int], grads: list[Tensor], *, scale: Tensor | None, exact: bool
) -> Look:
    watched = set(tensors)
    found = norms(tensors, grads)
    if scale is not None:
        found = tuple((own, values / scale.to(values.device)) for own, values in found)
    marks = {tensor: mark(grad) for tensor, grad in zip(tensors, grads, strict=True)}
    # A tensor can receive its gradient twice in one pass (reentrant checkpointing).
    order = tuple(dict.fromkeys(tensor for tensor in done.order if tensor in watched))
    look = Look(order, tuple(tensors), found, marks, own=done.own)
    if exact and all(_torch.is_host(values) for _, values in found):
        # On the host a look is free, and an exact one now is worth more than one after the script
        # has clipped. On a device it would be a wait.
        by_tensor = dict(zip(tensors, grads, strict=True))
        look.counts = counts({tensor: by_tensor[tensor] for tensor in suspects(found)})
    return look


def keep(state: State, lane: Lane, grads: dict[int, Tensor], scale: Tensor | None) -> None:
    """Keep copies of the gradients that a `capture` rule matched, in true units."""
    for tensor in lane.tensors:
        if tensor in grads:
            name = state.program.names[tensor]
            true = _dist.whole(unscaled(grads[tensor], scale))
            state.captures.keep(lane.rule, name, lane.clock.step, true)


def _log(state: State, lane: Lane, look: Look, grads: dict[int, Tensor]) -> None:
    found = [tensor for tensor in lane.tensors if tensor in grads]
    if not found:
        return
    column = {tensor: number for number, tensor in enumerate(lane.tensors)}
    columns = [column[tensor] for tensor in found]
    for stat, key in lane.keys.items():
        if stat == "l2":
            values = pick(look.norms, found)
        else:
            scale = state.scaling.scale
            with torch.no_grad():
                values = statistics(stat, [unscaled(grads[tensor], scale) for tensor in found])
        state.recorder.add(key, lane.clock.step, columns, values, replace=True)
    state.journal.fired(lane.rule.id, lane.clock.step, len(found))


def _log_contributions(state: State, done: Pass) -> None:
    """Write the rows of `norm-log` rules at `backward`, one per pass."""
    for rule_id, rows in done.logged.items():
        groups: dict[int, list[int]] = {}
        for tensor in sorted(rows):
            groups.setdefault(id(state.clocks[tensor]), []).append(tensor)
        for tensors in groups.values():
            clock = state.clocks[tensors[0]]
            lane = next(one for one in state.lanes(state.stages[rule_id]) if one.clock is clock)
            columns = [lane.tensors.index(tensor) for tensor in tensors]
            for stat, key in lane.keys.items():
                values = _stack([rows[tensor][stat] for tensor in tensors])
                state.recorder.add(key, clock.step, columns, values, replace=False)


def _stack(values: Sequence[Tensor]) -> Tensor:
    """Stack 0-dim statistics, on the host where they come from several devices."""
    if len({value.device for value in values}) > 1:
        values = [value.cpu() for value in values]
    return torch.stack(list(values))
