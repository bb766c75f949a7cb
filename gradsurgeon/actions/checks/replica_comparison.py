"""Compares the numbers that ranks with the same parameters have measured at the same update."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Finding, Findings, Missed, Replicas
from gradsurgeon.common._grouping import grouped
from gradsurgeon.tensors import _dist

# Ranks may sum in another order: differences below this share of a norm are rounding.
_ROUNDING = 1e-4
# Without `DistributedDataParallel`, equal gradients prove replicas after so many updates in a row.
_PROOF = 3
# Weights that differ by less than this share of the largest norm can give gradients that are equal in each bit.
_UNSEEN = 1e-6

_NORMS = "the norm of the first is {ours:.3g} on rank {first} and {theirs:.3g} on rank {other}"
_ELEMENTS = "the first has the norm {ours:.3g} on ranks {first} and {other}, and other elements"
_DIFFERENT = {
    "gradients": "{ranks} differ in the gradients of {{names}}: {numbers}. {remedy}",
    "weights": "{ranks} differ in the weights {{names}}, although their gradients are alike. {remedy}",
}

_REMEDIES: dict[Missed, str] = {
    "bypassed": (
        "DistributedDataParallel did not average: call the wrapper in the forward pass, not `model.module`"
    ),
    "twice": (
        "DistributedDataParallel averages once per call of the wrapper, and a later backward pass added gradients of "
        "each rank alone. Add up the losses and call `backward()` once, or call the wrapper before each `backward()`"
    ),
    "alone": (
        "The last backward pass before the update ran under `no_sync`, so each rank updated alone: leave `no_sync` "
        "before the last pass of each update"
    ),
    "alone at last": (
        "DistributedDataParallel averaged an earlier backward pass of each update, and the last one ran under `no_sync`, so each "
        "rank updates by a gradient of its own: run all passes but the last under `no_sync`"
    ),
    "unknown": (
        "DistributedDataParallel does not average {it}, because the script unfroze or replaced {it} after the wrapper was "
        "made: make the wrapper afterwards"
    ),
}
_LOST = "Look for code between `backward()` and `step()` that only some ranks run, and for a collective that loses data"
_MOVED = f"{_LOST}. Or the script moved or unfroze {{it}} after the wrapper was made, which then does not average {{it}}"
_SCALED = (
    "On rank {other} they are {factor:.3g} times as large as on rank {first}: look for a clip or a factor that only some "
    "ranks apply"
)
_SKIPPED = (
    "Rank {other} has made {theirs} updates and rank {first} {ours}: look for a condition around `optimizer.step()` that "
    "only some ranks meet"
)
_FROM_THE_START = (
    "The weights were never alike: broadcast the weights of rank {first} before training"
)
_SINCE_THEN = "The weights were alike before: look for an update, a weight decay or an assignment that only some ranks make"


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """The numbers of one rank at one update.

    Attributes:
        passes: the passes that led to the update, counted alike on all ranks.
        step: the number of the update on this rank.
        numbers: by parameter the norm and a signed sum of the gradient, and the norm and a signed sum of the weight.
            Shape ``[4, parameters]``.
        data: four numbers of the last batch.
    """

    passes: tuple[int, int]
    step: int
    numbers: Tensor
    data: Tensor


@dataclass(frozen=True, slots=True)
class _Difference:
    """What differs in one parameter between the first rank and another one; ``place`` is its column in a row."""

    place: int
    rank: int
    step: int
    remedy: str
    numbers: str = ""


class ReplicaComparison:
    """Compares the rows of the other ranks with those of the first rank.

    Under `DistributedDataParallel` all differences are faults. Otherwise ranks may train apart, as in a sweep, or hold
    other parts of a tensor. Ranks that have equal gradients, again and again, must have averaged them. Only if the weights
    differ nonetheless is that a fault.
    """

    def __init__(self, ranks: Sequence[int], indices: Sequence[int]) -> None:
        self._first, *self._others = ranks
        self._indices = indices
        # Maps another rank and a parameter to the updates in a row whose gradients were equal and new.
        self._equal = torch.zeros(len(self._others), len(indices))
        # Likewise: whether the weights were ever alike.
        self._met = torch.zeros(len(self._others), len(indices), dtype=torch.bool)
        # Likewise: in which weights and gradients differ, and the last pass was not averaged after an earlier one was.
        self._alone_at_last = torch.zeros(len(self._others), len(indices))
        # The last norms of gradients.
        self._norms = torch.zeros(len(indices))
        # Maps each rank to how many updates more than the first rank it had made at its first row.
        self._leads: dict[int, int] = {}
        # Differences of gradients that are a fault only if weights prove to differ, by rank and place.
        self._pending: dict[tuple[int, int], _Difference] = {}
        # The parameters whose gradients, or weights, need no further finding.
        self._reported = {}
        for cause in _DIFFERENT:
            self._reported[cause] = torch.zeros(len(indices), dtype=torch.bool)

    def compare(
        self, own: RankNumbers, others: Mapping[int, RankNumbers], replicas: Replicas
    ) -> Findings:
        """Compare the rows of some other ranks at one update with the row of the first rank."""
        skipped = self._ranks_that_skipped(own, others)
        theirs = self._numbers_of_others(own, others)
        gradients_apart = _differs(own.numbers[:2], theirs[:, :2])
        was_proven = self._equal >= _PROOF
        self._equal[gradients_apart] = 0
        self._note_equal(own.numbers[:2], theirs[:, :2])
        # Gradients that ranks have averaged must leave equal weights.
        averaged = ~gradients_apart
        least = 0.0
        if not replicas.promised:
            averaged = self._equal >= _PROOF
            least = _UNSEEN * float(own.numbers[2].nan_to_num().max())
        distances = theirs[:, 2:] - own.numbers[2:]
        weights_apart = _differs(own.numbers[2:], theirs[:, 2:], least)
        # An update less shows in any digit, however small the learning rate is.
        weights_apart |= skipped.unsqueeze(1) & (distances.abs() > 0).any(1)
        weights_alike = distances.isfinite().all(1) & ~weights_apart
        self._met |= weights_alike
        apart = gradients_apart & ~self._reported["gradients"]
        if replicas.promised:
            differences = self._differences_of_gradients(own, theirs, apart, replicas)
        else:
            proven = apart & was_proven
            for difference in self._differences_of_gradients(own, theirs, proven, replicas):
                self._pending[difference.rank, difference.place] = difference
            differences = self._settled(averaged & weights_apart, averaged & weights_alike)
            self._note_alone_at_last(gradients_apart & weights_apart, replicas)
            lost = apart & (self._alone_at_last == _PROOF)
            differences += self._differences_of_gradients(own, theirs, lost, replicas)
        yield from self._findings("gradients", differences)
        unreported = averaged & weights_apart & ~self._reported["weights"]
        were_alike = self._met | replicas.promised
        differences = self._differences_of_weights(own, others, unreported, skipped, were_alike)
        yield from self._findings("weights", differences)

    def _numbers_of_others(self, own: RankNumbers, others: Mapping[int, RankNumbers]) -> Tensor:
        """Return the numbers of all other ranks, shape ``[ranks, 4, parameters]``, NaN for a rank without a row."""
        unknown = torch.full_like(own.numbers, torch.nan)
        numbers = []
        for rank in self._others:
            has_row = rank in others
            numbers.append(others[rank].numbers if has_row else unknown)
        return torch.stack(numbers)

    def _ranks_that_skipped(self, own: RankNumbers, others: Mapping[int, RankNumbers]) -> Tensor:
        """Return which other ranks have, unlike the first rank, left out or made an update since their first rows."""
        skipped = []
        for rank in self._others:
            lead = others[rank].step - own.step if rank in others else None
            skipped.append(lead is not None and lead != self._leads.setdefault(rank, lead))
        return torch.tensor(skipped)

    def _note_equal(self, ours: Tensor, theirs: Tensor) -> None:
        """Count the gradients that show, by being equal, that ranks averaged them."""
        norms = ours[0]
        # A gradient of zero, or one that never changes, is equal on ranks that have nothing in common.
        is_new = (norms > 0) & ((norms - self._norms).abs() > _ROUNDING * norms)
        is_telling = is_new & (ours == theirs).all(1)
        # A few small gradients may be equal by chance, as where scripts take their signs.
        are_most = is_telling.sum(1, keepdim=True) > is_new.sum() / 2
        self._equal += is_telling & are_most
        self._norms = norms

    def _note_alone_at_last(self, apart: Tensor, replicas: Replicas) -> None:
        """Count the updates in a row whose last pass was not averaged after an earlier one was, and that differ."""
        kinds = [replicas.missed.get(index) == "alone at last" for index in self._indices]
        self._alone_at_last += 1
        self._alone_at_last *= apart & torch.tensor(kinds)

    def _differences_of_weights(
        self,
        own: RankNumbers,
        others: Mapping[int, RankNumbers],
        apart: Tensor,
        skipped: Tensor,
        were_alike: Tensor,
    ) -> list[_Difference]:
        differences: list[_Difference] = []
        for position, place in apart.nonzero().tolist():
            remedy = _FROM_THE_START
            if skipped[position]:
                remedy = _SKIPPED
            elif were_alike[position, place]:
                remedy = _SINCE_THEN
            rank = self._others[position]
            their_step = others[rank].step
            text = remedy.format(first=self._first, other=rank, ours=own.step, theirs=their_step)
            differences.append(_Difference(place, rank, own.step, text))
        return differences

    def _differences_of_gradients(
        self, own: RankNumbers, theirs: Tensor, apart: Tensor, replicas: Replicas
    ) -> list[_Difference]:
        differences: list[_Difference] = []
        norms = own.numbers[0]
        for position, place in apart.nonzero().tolist():
            rank = self._others[position]
            norms_there = theirs[position, 0]
            factor = _common_factor(norms[apart[position]], norms_there[apart[position]])
            missed = replicas.missed.get(self._indices[place])
            remedy = _MOVED if replicas.promised else _LOST
            if missed is not None:
                remedy = _REMEDIES[missed]
            elif factor is not None:
                remedy = _SCALED.format(other=rank, factor=factor, first=self._first)
            numbers = self._norms_of(rank, norms[place].item(), norms_there[place].item())
            differences.append(_Difference(place, rank, own.step, remedy, numbers))
        return differences

    def _settled(self, weights_apart: Tensor, weights_alike: Tensor) -> list[_Difference]:
        """Return and remove pending differences that weights prove to be faults; drop those that left no trace."""
        faults: list[_Difference] = []
        for rank, place in list(self._pending):
            position = self._others.index(rank)
            if weights_apart[position, place]:
                faults.append(self._pending.pop((rank, place)))
            elif weights_alike[position, place]:
                del self._pending[rank, place]
        return faults

    def _findings(self, cause: str, differences: Iterable[_Difference]) -> Findings:
        """Yield one finding for all differences that have a remedy in common."""
        by_remedy = grouped(differences, attrgetter("step", "remedy"))
        for (step, remedy), group in by_remedy.items():
            group.sort(key=attrgetter("place"))
            members = {self._first}
            indices: dict[int, None] = {}
            for each in group:
                self._reported[cause][each.place] = True
                members.add(each.rank)
                indices[self._indices[each.place]] = None
            ranks = _dist.named(sorted(members))
            text = _DIFFERENT[cause].format(ranks=ranks, numbers=group[0].numbers, remedy=remedy)
            yield Finding(cause, text, tuple(indices), step=step)

    def _norms_of(self, rank: int, ours: float, theirs: float) -> str:
        text = _NORMS
        if abs(ours - theirs) <= _ROUNDING * max(ours, theirs):
            text = _ELEMENTS
        return text.format(ours=ours, theirs=theirs, first=self._first, other=rank)


def _differs(ours: Tensor, theirs: Tensor, least: float = 0.0) -> Tensor:
    """Return by rank and parameter whether norms, or sums, differ by more than rounding.

    ``ours`` has the shape ``[2, parameters]``, ``theirs`` ``[ranks, 2, parameters]``.
    """
    bound = _ROUNDING * torch.maximum(ours[0], theirs[:, 0]) + least
    # Nothing is greater than NaN, which is the trap's to tell, and infinity minus infinity is NaN.
    return ((ours - theirs).abs() > bound.unsqueeze(1)).any(1)


def _common_factor(ours: Tensor, theirs: Tensor) -> float | None:
    """Return the factor between the gradients of two ranks, if it is one factor for all of them and not 1."""
    if len(ours) < 2 or not (ours > 0).all():  # noqa: PLR2004 # one gradient shows no pattern
        return None
    factors = theirs / ours
    factor = factors.mean().item()
    is_common = (factors - factor).abs().max().item() < _ROUNDING * factor
    if is_common and abs(factor - 1) > _ROUNDING:
        return factor
    return None
