"""What backward passes have left, until the update that they feed."""

from collections.abc import Sequence

from torch import Tensor

from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.training_events import GradientSnapshot


class PassHistory:
    """What backward passes left, of parameters whose update has not come yet. Its counter may come later than the pass."""

    def __init__(self) -> None:
        self._snapshots: list[GradientSnapshot] = []

    def add(self, snapshot: GradientSnapshot) -> None:
        members = set(snapshot.members)
        # A step of many micro-batches must not keep the graph of each.
        self._snapshots = [
            earlier if members.isdisjoint(earlier.members) else earlier.without_graph()
            for earlier in self._snapshots
        ]
        self._snapshots.append(snapshot)

    def feeding(self, counter: StepCounter) -> Sequence[GradientSnapshot]:
        """Return what the backward passes of an update left, the earliest first."""
        snapshots = [snapshot.among(counter.indices) for snapshot in self._snapshots]
        return [snapshot for snapshot in snapshots if snapshot.members]

    def forget(self, counter: StepCounter) -> None:
        """Forget the passes of an update that is over."""
        updated = set(counter.indices)
        waiting = []
        for snapshot in self._snapshots:
            members = tuple([index for index in snapshot.members if index not in updated])
            if members:
                waiting.append(snapshot.among(members))
        self._snapshots = waiting

    def scale(self, counter: StepCounter) -> Tensor | None:
        """Return the scale of a `GradScaler` on the gradients of an update."""
        for snapshot in self.feeding(counter):
            if snapshot.done.scale is not None:
                return snapshot.done.scale
        return None
