"""The update that a gradient feeds: each optimizer has one counter of attempted updates."""

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
    """The counter of every tensor. Tensors share a common counter until an optimizer claims them."""

    def __init__(self, count: int, start: int) -> None:
        self.common = StepCounter(start, tuple(range(count)))
        # The start of an optimizer's counter that takes over from no other.
        self.start = start
        self._of = [self.common] * count
        # Callers that cache a grouping by counter compare this number.
        self.version = 0
        # Restored step per tensor.
        self._resumed: dict[int, int] = {}

    def __getitem__(self, tensor: int) -> StepCounter:
        return self._of[tensor]

    def among(self, tensors: Sequence[int]) -> list[StepCounter]:
        if not tensors:
            return []
        first = self._of[tensors[0]]
        if len(first.tensors) == len(self._of):  # nearly always one optimizer owns all tensors
            return [first]
        return list(
            {id(counter): counter for counter in map(self._of.__getitem__, tensors)}.values()
        )

    @property
    def latest(self) -> int:
        return max((counter.step for counter in self._of), default=self.common.step)

    def begin(self, tensors: Iterable[int]) -> int:
        """Return the first number of a counter for tensors that no optimizer has owned yet."""
        return max(
            [self._resumed.get(tensor, self.start) for tensor in tensors], default=self.start
        )

    def resume(self, steps: Mapping[int, int], *, common: int, latest: int) -> None:
        """Resume from the numbers of tensors; tensors without a number begin with the latest."""
        self._resumed = dict(steps)
        self.common.step, self.start = common, latest
        for counter in {id(holder): holder for holder in self._of}.values():
            if counter is not self.common:
                counter.step = self.begin(counter.tensors)

    def claim(self, tensors: Iterable[int], counter: StepCounter) -> None:
        """Give tensors to a counter.

        A schedule must not restart because the script rebuilt its optimizer, so the counter resumes from the
        latest counter of its tensors. Other tensors of the counter return to the common counter, because
        an optimizer may exchange its parameters.
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
        # Passes that came before their optimizer was known still feed its next update.
        counter.passes = max([counter.passes, *(holder.passes for holder in earlier)])
        for tensor in wanted:
            self._of[tensor] = counter
        counter.tensors = wanted
        for other in {id(holder): holder for holder in (*self._of, *earlier, self.common)}.values():
            other.tensors = tuple(i for i, holder in enumerate(self._of) if holder is other)
        self.version += 1
