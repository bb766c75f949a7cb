"""Finds copies of parameters that were made before the last updates, and are used after them."""

from functools import partial
from typing import Any

from gradsurgeon.actions.checks.base import Check, Finding, Findings, Pass, Update

# Two networks that train in turn under one `autocast` may be an update behind.
_BEHIND = 3
# So many updates are looked at: a loop is inside of an `autocast` block from its start.
_LOOKED_AT = 20
_STALE = (
    "each pass computes with a copy of {{names}} in another dtype that is older than the last {behind} updates, so these updates "
    "have no effect yet. `torch.autocast` keeps such copies until its block ends: enter it anew in each step, around the "
    "forward pass, or give it `cache_enabled=False`"
)


class StaleCopies(Check):
    """Looks at the graphs of the passes between the first updates."""

    def __init__(self) -> None:
        # The number of the newest loss so far, and of those that led to updates. Torch numbers the nodes of a thread upwards.
        self._newest = -1
        self._updates: list[int] = []

    def before_pass(self, starting: Pass) -> Findings:
        graph = starting.graph
        # A pass that was made earlier, or in another thread, is not compared: delayed gradients are older as a whole.
        if len(self._updates) == _LOOKED_AT or graph is None or graph.made <= self._newest:
            return
        self._newest = graph.made
        if len(self._updates) < _BEHIND:
            return
        stale = {0}
        for user in graph.nodes():
            if user._sequence_nr() > self._updates[-1]:  # noqa: SLF001 # no public name
                for node, _ in user.next_functions:
                    stale.add(_copied(node, self._updates[-_BEHIND]))
        indices = tuple(i for i, param in starting.originals.items() if id(param) in stale)
        if indices:
            yield Finding("stale copy", _STALE.format(behind=_BEHIND), indices)

    def after_update(self, update: Update) -> Findings:
        if len(self._updates) < _LOOKED_AT:
            update.when_known(partial(self._count, self._newest))
        return ()

    def _count(self, newest: int, took_place: bool) -> None:  # noqa: FBT001 # a callback
        # Several optimizers may share a pass.
        if took_place and newest not in self._updates[-1:]:
            self._updates.append(newest)


def _copied(node: Any, before: int) -> int:
    """Return the id of the leaf of which an older node of a graph makes a copy in another dtype, 0 if it makes none."""
    if node is None or node._sequence_nr() >= before or node.name() != "ToCopyBackward0":  # noqa: SLF001 # likewise
        return 0
    leaf, _ = node.next_functions[0]
    return id(getattr(leaf, "variable", None))
