"""Which update a gradient feeds: one counter per optimizer, of attempted updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class StepCounter:
    """Counts the updates of one optimizer; ``step`` is the number of the next one, from 0."""

    step: int
    tensors: tuple[int, ...] = field(default=())
    # Backward passes that feed the next update.
    passes: int = 0
    # Whether it has counted an update.
    begun: bool = False

    def tick(self) -> None:
        self.begun = True
        self.step += 1
        self.passes = 0


class StepCounters:
    """The counter of every tensor. Until an optimizer claims them, all go by a common one."""

    def __init__(self, count: int, start: int) -> None:
        self.common = StepCounter(start, tuple(range(count)))
        # Where the counter of an optimizer begins that takes over from nobody.
        self.start = start
        self._of = [self.common] * count
        # Whoever caches a grouping by counter compares this number.
        self.version = 0
        # Where those go on that a state has told of, by tensor.
        self._resumed: dict[int, int] = {}

    def __getitem__(self, tensor: int) -> StepCounter:
        return self._of[tensor]

    def among(self, tensors: Sequence[int]) -> list[StepCounter]:
        if not tensors:
            return []
        first = self._of[tensors[0]]
        if len(first.tensors) == len(self._of):  # one optimizer for everything, as nearly always
            return [first]
        return list(
            {id(counter): counter for counter in map(self._of.__getitem__, tensors)}.values()
        )

    @property
    def latest(self) -> int:
        return max((counter.step for counter in self._of), default=self.common.step)

    def begin(self, tensors: Iterable[int]) -> int:
        """Return where the counter of an optimizer begins that has met no other before."""
        return max(
            [self._resumed.get(tensor, self.start) for tensor in tensors], default=self.start
        )

    def resume(self, steps: Mapping[int, int], *, common: int, latest: int) -> None:
        """Go on from numbers that tensors had; what they do not name begins with the latest."""
        self._resumed = dict(steps)
        self.common.step, self.start = common, latest
        for counter in {id(holder): holder for holder in self._of}.values():
            if counter is not self.common:
                counter.step = self.begin(counter.tensors)

    def claim(self, tensors: Iterable[int], counter: StepCounter) -> None:
        """Give tensors to a counter.

        A schedule must not begin anew because the script rebuilt its optimizer, so the counter goes
        on from the latest one that its tensors had. What the counter had besides goes by the common one
        again: an optimizer may exchange its parameters.
        """
        wanted = tuple(sorted(tensors))
        held = [tensor for tensor, holder in enumerate(self._of) if holder is counter]
        if held == list(wanted):
            return
        for tensor in held:
            self._of[tensor] = self.common
        earlier = [self._of[tensor] for tensor in wanted]
        counter.step = max(
            [counter.step, *(holder.step for holder in earlier if holder is not self.common)]
        )
        # Passes that came before their optimizer was known feed its next update all the same.
        counter.passes = max([counter.passes, *(holder.passes for holder in earlier)])
        for tensor in wanted:
            self._of[tensor] = counter
        counter.tensors = wanted
        for other in {id(holder): holder for holder in (*self._of, *earlier, self.common)}.values():
            other.tensors = tuple(i for i, holder in enumerate(self._of) if holder is other)
        self.version += 1
