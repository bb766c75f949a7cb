"""What the ranks have said of an update, with the votes that they cast at the end of its last backward pass."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from gradsurgeon.distributed.ranks import FINE
from gradsurgeon.distributed.session_discovery import LIMIT
from gradsurgeon.distributed.votes import Objection, Voter


@dataclass(slots=True)
class VotedPass:
    """A pass that was voted on, and the tensors whose last pass it is."""

    voter: Voter
    number: int
    indices: set[int]


@dataclass(frozen=True, slots=True)
class Heard:
    """The votes of the ranks on an update.

    Attributes:
        voter: the voter that read the votes; ``None`` if this rank decides alone.
        meeting: the name under which ranks that did not vote tell each other of a trip.
        limit: how many seconds they wait there for each other.
    """

    voter: Voter | None = None
    objections: tuple[Objection, ...] = ()
    unanimous: bool = False
    meeting: str = ""
    limit: float = LIMIT

    @property
    def severity(self) -> int:
        """The worst severity of the objections."""
        return max((objection.severity for objection in self.objections), default=FINE)

    @property
    def worst(self) -> Objection:
        """The objection that all ranks follow: the worst one, from the lowest rank that raised it."""
        severity = self.severity
        worst = [each for each in self.objections if each.severity == severity]
        return min(worst, key=attrgetter("rank"))

    def exchange(self, value: object, topic: str) -> dict[int, Any]:
        """Return what the ranks that object to the update say of it, by rank; empty if nobody can be asked."""
        if self.voter is None:
            return {}
        name = self.meeting and f"{self.meeting}/{topic}"
        return self.voter.exchange(value, self.limit, name)

    @property
    def guilty(self) -> tuple[int, ...]:
        """The ranks that contributed NaN or Inf to an average."""
        guilty = {objection.rank for objection in self.objections if objection.guilty}
        return tuple(sorted(guilty))


ALONE = Heard()
