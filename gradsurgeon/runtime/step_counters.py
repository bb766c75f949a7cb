"""Step counters, one per optimizer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class StepCounter:
    """Counts the updates of one optimizer; ``step`` is the number of the next one, from 0."""

    step: int
    indices: tuple[int, ...] = field(default=())
    # Backward passes that feed the next update.
    passes: int = 0
    # How many parameters had a gradient after the last of them.
    reached: int = 0
    # Whether it has counted an update.
    begun: bool = False
    # The trips in a row of each trap, without the current update; and with it, as far as it was judged.
    trips: dict[str, int] = field(default_factory=dict)
    trips_now: dict[str, int] = field(default_factory=dict)
    # The number of updates in a row that a `GradScaler` has left out.
    scaler_skips: int = 0
    # The last update whose loss and learning rates were recorded.
    recorded: int = -1

    def take_rows(self, other: "StepCounter") -> None:
        """Continue the rows of trips and skips of another counter."""
        self.scaler_skips = max(self.scaler_skips, other.scaler_skips)
        for rule, number in other.trips.items():
            self.trips[rule] = max(self.trips.get(rule, 0), number)

    def tick(self) -> None:
        self.begun = True
        self.step += 1
        self.passes = 0
        self.end_row()

    def end_row(self) -> None:
        """Enter the trips of an update into their rows."""
        if self.trips_now:
            trips = self.trips | self.trips_now
            self.trips = {rule: number for rule, number in trips.items() if number}
            self.trips_now.clear()


class StepCounters:
    """The counter of every tensor. Tensors share a common counter until an optimizer claims them."""

    def __init__(self, names: Sequence[str], start: int) -> None:
        count = len(names)
        self.common = StepCounter(start, tuple(range(count)))
        # The start of an optimizer's counter that takes over from no other.
        self.start = start
        self._of = [self.common] * count
        # Callers that cache a grouping by counter compare this number.
        self.version = 0
        # Each counter that has a parameter.
        self.all = [self.common]
        # Restored step per tensor.
        self._resumed: dict[int, int] = {}
        # The first parameter of each module.
        self._first_params: dict[str, int] = {}
        for index, name in enumerate(names):
            module = name
            while module:
                module = module.rpartition(".")[0]
                self._first_params.setdefault(module, index)

    def of_module(self, module: str) -> StepCounter:
        """Return the counter of the optimizer that owns the first parameter of a module."""
        if not self._of:
            return self.common
        # A module without parameters uses the first parameter of the model.
        return self._of[self._first_params.get(module, 0)]

    def __getitem__(self, index: int) -> StepCounter:
        return self._of[index]

    def among(self, indices: Sequence[int]) -> list[StepCounter]:
        if not indices:
            return []
        first = self._of[indices[0]]
        if len(first.indices) == len(self._of):  # nearly always one optimizer owns all tensors
            return [first]
        counters = dict.fromkeys(self._of[index] for index in indices)
        return list(counters)

    @property
    def latest(self) -> int:
        if not self.all:
            return self.common.step
        return max([counter.step for counter in self.all])

    def begin(self, indices: Iterable[int]) -> int:
        """Return the first number of a counter for tensors that no optimizer has owned yet."""
        return max((self._resumed.get(t, self.start) for t in indices), default=self.start)

    def resume(self, steps: Mapping[int, int], *, common: int, latest: int) -> None:
        """Resume from the numbers of tensors; tensors without a number begin with the latest."""
        self._resumed = dict(steps)
        self.common.step = common
        self.start = latest
        for counter in self.all:
            if counter is not self.common:
                counter.step = self.begin(counter.indices)

    def claim(self, indices: Iterable[int], counter: StepCounter) -> None:
        """Give tensors to a counter, which goes on from their latest one: a script may rebuild its optimizer."""
        wanted = tuple(sorted(indices))
        held = self._held_by(counter)
        if held == wanted:
            return
        for index in held:
            self._of[index] = self.common
        earlier = [self._of[index] for index in wanted]
        for holder in earlier:
            if holder is not self.common:
                counter.step = max(counter.step, holder.step)
            if not counter.begun:  # an optimizer that a script has built anew
                counter.take_rows(holder)
            # Passes that came before their optimizer was known still feed its next update.
            counter.passes = max(counter.passes, holder.passes)
        for index in wanted:
            self._of[index] = counter
        counter.indices = wanted
        for other in {*self._of, *earlier, self.common}:
            other.indices = self._held_by(other)
        self.all = list(dict.fromkeys(self._of))
        self.version += 1

    def _held_by(self, counter: StepCounter) -> tuple[int, ...]:
        held = [index for index, holder in enumerate(self._of) if holder is counter]
        return tuple(held)
