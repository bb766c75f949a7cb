"""What the ranks have said of an update, with the votes that they cast at the end of its last backward pass."""

from dataclasses import dataclass

from gradsurgeon.distributed.ranks import FINE
from gradsurgeon.distributed.votes import Objection, Voter


@dataclass(frozen=True, slots=True)
class Heard:
    """The votes of the ranks on an update.

    Attributes:
        voter: the voter that read the votes; ``None`` if this rank decides alone.
    """

    voter: Voter | None = None
    objections: tuple[Objection, ...] = ()
    unanimous: bool = False

    @property
    def severity(self) -> int:
        """The worst severity of the objections."""
        return max((one.severity for one in self.objections), default=FINE)

    @property
    def worst(self) -> Objection:
        """The objection that all ranks follow: the worst one, from the lowest rank that raised it."""
        return min(self.objections, key=lambda one: (-one.severity, one.rank))

    @property
    def guilty(self) -> tuple[int, ...]:
        """The ranks that contributed NaN or Inf to an average."""
        return tuple(sorted({one.rank for one in self.objections if one.guilty}))


ALONE = Heard()
