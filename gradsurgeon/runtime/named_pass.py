"""Backward passes of named losses, and how ranks meet before one of theirs or a plain one."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.actions import LossRule
from gradsurgeon.distributed import data_parallel
from gradsurgeon.errors import printable
from gradsurgeon.tensors.backward_graph import BackwardGraph

if TYPE_CHECKING:
    from gradsurgeon.runtime.loss_rules import DueLossRule, LossRules

_FSDP = (
    "the gradients of single losses cannot be had of parameters that are sharded (fully_shard, "
    "FullyShardedDataParallel, tensor parallelism), as {name} is: combine where the heads take their features, `modules: [...]` and "
    "`tensor: input.grad`"
)


class NamedPass:
    """The backward pass of named losses that a thread runs, what it reaches, and what rules have seen of them."""

    def __init__(self, due: Sequence[DueLossRule], leaves: Sequence[Tensor]) -> None:
        self.leaves = leaves
        self._seen = {(one.rules, one.rule.id): set(one.tensors) for one in due}
        # What has got a gradient although no loss alone gives it one.
        self.unseen: list[str] = []

    def reached(self, rules: LossRules, rule: LossRule, tensors: Sequence[int]) -> None:
        seen, context = self._seen.get((rules, rule.id), ()), rules.context
        for tensor in tensors:
            name = context.program.names[tensor]
            if _dist.is_divided(context.parameters.param(tensor)):
                self.unseen.append(f"rule {rule.id}: {_FSDP.format(name=printable(name))}")
            elif tensor not in seen:
                self.astray(rule, name)

    def astray(self, rule: LossRule, name: str) -> None:
        self.unseen.append(
            f"rule {rule.id}: {printable(name)} has got a gradient that no single loss gives it: part of the graph cannot "
            "be gone through for one loss alone, as with checkpoint(use_reentrant=True); use use_reentrant=False"
        )


def begun(
    sessions: Sequence[LossRules], graph: BackwardGraph, inputs: Sequence[Tensor] = ()
) -> None:
    """Take notice of a pass that is about to begin. A collective where ranks average it.

    All ranks have the plain sum of a pass in which one of them passes no named losses.

    Args:
        sessions: those that have rules on losses.
        graph: what the pass runs through.
        inputs: the only leaves that it gives gradients, if it was told.
    """
    if not sessions or current() is not None or not data_parallel.is_any_awaiting():
        return
    leaves = list(inputs or graph.leaves())
    for one in in_order(sessions):
        for _ in one.ranks.agreed(leaves, None):
            pass


def in_order(sessions: Iterable[LossRules]) -> list[LossRules]:
    """Return sessions in the order in which all ranks go through them, however these have applied them."""
    return sorted(sessions, key=lambda one: one.ranks.order)


class _Thread(threading.local):
    named: NamedPass | None = None


_thread = _Thread()


def current() -> NamedPass | None:
    """Return the pass of named losses that this thread runs."""
    return _thread.named


@contextmanager
def running(named: NamedPass) -> Iterator[None]:
    before, _thread.named = _thread.named, named
    try:
        yield
    finally:
        _thread.named = before
