"""Finds ranks whose gradients or weights differ although they should be replicas of one another."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers
from gradsurgeon.checks.base import Check, Finding, Mail, Pass, Rows, Update
from gradsurgeon.tensors.sampling import by_device, sample

# Ranks send rows of so many updates together.
BATCH = 8
# Ranks whose final gradients were alike in so many updates in a row average them, whatever averages them.
ALIKE_UPDATES = 3
# After so many passes, weights are compared in each eighth only: a difference of weights stays.
_SETTLED, _LATER = 32, 8
# Rows of so many batches wait for a rank that is late; older ones are dropped.
_MOST_WAITING = 16
# Ranks may sum in another order: differences below this share of a number are rounding.
_ROUNDING = 1e-4

_GRADIENTS = (
    "{ranks} differ in the gradients of {{names}}: the norm of the first is {ours:.3g} on rank 0 and {theirs:.3g} on rank "
    "{other}. "
)
_WEIGHTS = (
    "{ranks} differ in the weights {{names}}, although their gradients are alike. Broadcast the weights of rank 0 before "
    "training, and look for an update, a weight decay or an assignment that only some ranks make"
)
_BYPASSED = "DistributedDataParallel did not average: call the wrapper in the forward pass, not `model.module`"
_LOST = "Look for code between `backward()` and `step()` that only some ranks run, and a collective that loses data"


@dataclass(frozen=True, slots=True)
class _Row:
    step: int
    # Ranks are compared by passes: a rank that skips an update does not skip the pass.
    passes: int
    numbers: tuple[float, ...]  # norms of gradients, then in some rows numbers of weights


@dataclass(slots=True)
class _Owner:
    place: int
    rows: list[_Row] = field(default_factory=list)
    sent: int = 0
    # By number of batch, this rank's own rows and the tensors that they are about.
    waiting: dict[int, tuple[list[_Row], Sequence[int]]] = field(default_factory=dict)
    alike: int = 0
    is_local: bool = False
    is_averaged: bool = False
    # A difference without a wrapper: a fault if the ranks are alike again, else they train apart.
    parted: Finding | None = None


class RanksCheck(Check):
    def __init__(self) -> None:
        self._owners: dict[Hashable, _Owner] = {}
        self._passes = 0

    def after_pass(self, done: Pass) -> Iterable[Finding]:
        del done
        self._passes += 1
        return ()

    def before_edits(self, update: Update) -> Iterable[Finding]:
        mail = update.mail
        if mail is None:
            return ()
        owner = self._owners.setdefault(update.owner, _Owner(len(self._owners)))
        # Ranks that update alone, even once, drift apart: local SGD averages their weights now and then.
        owner.is_local |= mail.is_local()
        if owner.is_local:
            return ()
        averaged, passes = mail.averaged(), self._passes
        tensors = [
            t for t in update.tensors if t in update.groups and (t in averaged or not averaged)
        ]

        def arrived(values: Tensor) -> Iterator[Finding]:
            owner.rows.append(_Row(update.step, passes, tuple(values.tolist())))
            yield from _exchanged(owner, tensors, mail)

        owner.is_averaged = bool(averaged)
        if tensors:
            has_weights = passes <= _SETTLED or passes % _LATER == 0
            update.later(_measured(update, tensors, has_weights=has_weights), arrived)
        return ()


def _exchanged(owner: _Owner, tensors: Sequence[int], mail: Mail) -> Iterator[Finding]:
    if len(owner.rows) < min(BATCH, 1 + owner.sent):
        return
    rows, owner.rows = owner.rows, []
    mail.post(f"{owner.place}/{owner.sent}", {row.passes: row.numbers for row in rows})
    if mail.rank == mail.ranks[0]:
        owner.waiting[owner.sent] = rows, tensors
        for number in sorted(owner.waiting)[:-_MOST_WAITING]:
            del owner.waiting[number]
    owner.sent += 1
    for number in sorted(owner.waiting):
        theirs = mail.take(f"{owner.place}/{number}")
        if theirs is None:
            return
        ours, matched = owner.waiting.pop(number)
        others = dict(zip(mail.ranks[1:], theirs, strict=True))
        yield from _compared(owner, matched, ours, others)


def _measured(update: Update, tensors: Sequence[int], *, has_weights: bool) -> Tensor:
    """Return the norm of each gradient, -1 without one, and perhaps of a sample of each weight."""
    device = update.params[tensors[0]].device
    norms: dict[int, Tensor] = {}
    for some in by_device([t for t in tensors if t in update.grads], update.grads):
        norms |= zip(some, update.norms(some).unbind(), strict=True)
    absent = torch.tensor(-1.0, device="cpu")
    numbers = [norms.get(t, absent) for t in tensors]
    if has_weights:
        weights: dict[int, Tensor] = {}
        for some in by_device(tensors, update.params):
            samples = _numbers.norms([sample(update.params[t]) for t in some])
            weights |= zip(some, samples.unbind(), strict=True)
        numbers += [weights[t] for t in tensors]
    return torch.stack([number.to(device) for number in numbers])


def _compared(
    owner: _Owner, tensors: Sequence[int], ours: Sequence[_Row], theirs: Mapping[int, Rows]
) -> Iterator[Finding]:
    count = len(tensors)
    for row in ours:
        others = {rank: rows.get(row.passes, ()) for rank, rows in theirs.items()}
        if any(len(numbers) != len(row.numbers) for numbers in others.values()):
            continue
        apart = _differing(row.numbers[:count], {r: n[:count] for r, n in others.items()})
        if apart:
            remedy = _LOST if owner.alike or not owner.is_averaged else _BYPASSED
            found = _finding("gradients", _GRADIENTS + remedy, row, tensors, apart)
            if owner.is_averaged:
                yield found
            elif owner.parted is not None:
                # Alike for a while, then apart: a sweep, or local SGD.
                owner.is_local = True
                return
            elif owner.alike >= ALIKE_UPDATES:
                owner.parted = found
            owner.alike = 0
            continue
        owner.alike += 1
        if owner.parted is not None and owner.alike >= ALIKE_UPDATES:
            yield owner.parted
            owner.parted = None
        apart = _differing(row.numbers[count:], {r: n[count:] for r, n in others.items()})
        if apart and (owner.is_averaged or owner.alike >= ALIKE_UPDATES):
            yield _finding("weights", _WEIGHTS, row, tensors, apart)


def _differing(
    ours: Sequence[float], theirs: dict[int, Sequence[float]]
) -> dict[int, tuple[int, float, float]]:
    """Return, by place of a tensor, the first rank that differs there, with its number and ours."""
    found: dict[int, tuple[int, float, float]] = {}
    for rank, numbers in theirs.items():
        for place, (mine, other) in enumerate(zip(ours, numbers, strict=True)):
            # A NaN is the trap's to tell.
            finite = math.isfinite(mine) and math.isfinite(other)
            if finite and abs(mine - other) > _ROUNDING * max(abs(mine), abs(other)):
                found.setdefault(place, (rank, other, mine))
    return found


def _finding(
    cause: str,
    text: str,
    row: _Row,
    tensors: Sequence[int],
    apart: dict[int, tuple[int, float, float]],
) -> Finding:
    other, theirs, ours = next(iter(apart.values()))
    # The first rank compares.
    ranks = _dist.named([0, *sorted({rank for rank, _, _ in apart.values()})])
    text = text.format(ranks=ranks, other=other, theirs=theirs, ours=ours)
    return Finding(cause, text, tuple(tensors[place] for place in apart), step=row.step)
