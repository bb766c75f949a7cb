"""Shows rules the gradients that feed an update, and lets ranks vote on them: after a pass, or when an engine has collected them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from gradsurgeon.distributed.votes import Objection
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.rank_agreement import RankAgreement
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.training import Training


class FinalGradients:
    def __init__(self, context: Context, training: Training, agreement: RankAgreement) -> None:
        self._context = context
        self._training = training
        self._agreement = agreement
        # The last backward pass whose gradients an engine collects.
        self._collected: BackwardPass | None = None

    @contextmanager
    def votes_on(self, done: BackwardPass, *, casts: bool = True) -> Iterator[list[Objection]]:
        """Find the other ranks; cast this rank's vote, the objections in the list, at the end: other ranks may wait for it."""
        ranks = self._context.ranks
        objections: list[Objection] = []
        try:
            if ranks.are_several:
                ranks.refuse_uneven()
                self._agreement.find_sessions(done)
            yield objections
        finally:
            if ranks.are_several and casts:
                self._agreement.cast(done, objections)

    def show(self, done: BackwardPass) -> list[Objection]:
        """Show the gradients that a pass has left; return this rank's objections."""
        self._training.act_after_pass(done)
        return self._training.traps.objections(done) if self._agreement.votes(done) else []

    def collect(self, done: BackwardPass) -> BackwardPass:
        """Note a pass whose gradients an engine adds to earlier ones, outside of `.grad`; return the pass with this fact."""
        self._collected = replace(done, had=frozenset(done.indices))
        return self._collected

    def show_collected(self, counter: StepCounter, scale: Tensor | None) -> None:
        """Show the gradients that an engine has collected, right before its update."""
        if self._collected is None:
            return
        reached = dict.fromkeys((*self._collected.indices, *counter.indices))
        done = replace(self._collected, indices=tuple(reached), scale=scale)
        self._collected = None
        # On an overflow of scaled gradients, the engine itself agrees with all ranks.
        with self.votes_on(done, casts=scale is None) as objections:
            objections.extend(self.show(done))
