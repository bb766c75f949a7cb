"""A tensor of one step in two runs, with what is known of it. Needs numpy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gradsurgeon.report.comparison.reading import Numbers, TensorOfStep
from gradsurgeon.report.spikes import Floats

RESIZED = "another number of elements"
MISSING_IN_RUN = "missing in the run"
MISSING_IN_REFERENCE = "missing in the reference"


@dataclass(eq=False)
class Pair:
    """A tensor of one step in both runs: the numbers of run, reference and noise runs, and what comes of them.

    Attributes:
        key: which tensor it is.
        row: the number of the pair among those of the tensor.
        numbers: of each run, `None` where a run lacks the tensor.
        micro_batch: the micro-batch.
        call: the call within the micro-batch.
        place: the place among all tensors of a step.
        distance: how far the runs are apart, relative to the norm.
        tolerance: the distance that is allowed.
        floor: the distance that rounding to its dtype makes.
        shift: the relative difference of the norms.
        is_undecided: whether rounding decides it.
    """

    key: TensorOfStep
    row: int
    numbers: Sequence[Numbers | None]
    micro_batch: int = 0
    call: int = 0
    place: tuple[int, ...] = ()
    distance: float = 0.0
    tolerance: float = 0.0
    floor: float = 0.0
    shift: float = 0.0
    is_undecided: bool = False

    def __post_init__(self) -> None:
        self.step, self.kind, self.rank, self.name = self.key
        self.phase = self.kind.phase
        self.base = self.kind.base
        self.tensor = self.kind.tensor
        self.text = self.kind.text(self.name)
        # The fate of the tensor, empty if both runs have it.
        self.state = self._state()

    def _state(self) -> str:
        ours, theirs = self.numbers[:2]
        if ours is None:
            return MISSING_IN_RUN
        if theirs is None:
            return MISSING_IN_REFERENCE
        if self.kind.of_modules and abs(ours[3] - theirs[3]) > 0:
            return RESIZED
        return ""

    @property
    def norm(self) -> float:
        """The norm in the reference, or in the run alone."""
        numbers = self.numbers[1] or self.numbers[0]
        return numbers[0] if numbers else np.nan

    @property
    def numel(self) -> float:
        reference = self.numbers[1]
        return reference[3] if reference else np.nan

    @property
    def is_apart(self) -> bool:
        return self.distance > self.tolerance and not self.is_undecided

    @property
    def ratio(self) -> float:
        """How many times the allowed distance; where none is allowed, 0 or infinite."""
        if not self.distance:
            return 0.0
        return self.distance / self.tolerance if self.tolerance else np.inf

    @property
    def why(self) -> str:
        """Why there is no distance, empty if there is one."""
        ours = self.numbers[0]
        if self.state or not ours or np.isfinite(self.distance):
            return self.state
        if np.isfinite(ours[:3]).all():
            return "non-finite in the reference"
        return "non-finite in the run"


def values_of(pairs: Iterable[Pair], runs: int) -> Floats:
    """Return norms and projections of shape `[pairs, runs, 3]`, NaN where a run lacks a tensor."""
    missing = (np.nan,) * 3
    values = []
    for pair in pairs:
        values += [(numbers or missing)[:3] for numbers in pair.numbers]
    return np.array(values, float).reshape(-1, runs, 3)


def texts_of(pairs: Iterable[Pair]) -> list[str]:
    """Return the texts of some tensors, each once."""
    return list(dict.fromkeys(pair.text for pair in pairs))
