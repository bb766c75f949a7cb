"""Finds ranks whose gradients or weights differ although they should be replicas of one another."""

from __future__ import annotations

import math
import struct
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.checks.base import Check, Finding, Mail, Update
from gradsurgeon.checks.sampling import sample

# Ranks send rows of so many updates together.
BATCH = 8
# Ranks whose final gradients were alike in so many updates in a row average them, whatever averages them.
ALIKE_UPDATES = 3
# Rows of so many batches wait for a rank that is late; older ones are dropped.
_MOST_WAITING = 16
# Ranks may sum in another order: differences below this share of a number are rounding.
_ROUNDING = 1e-4

_GRADIENTS = (
    "{ranks} differ in the gradients of {{names}}: the norm of the first is {ours:.3g} on rank {first} and {theirs:.3g} on "
    "rank {other}{until}. {remedy}"
)
_BYPASSED = (
    "DistributedDataParallel holds this model, but did not average: call the wrapper in the forward pass, not "
    "`model.module`"
)
_LOST = (
    "Look for code between `backward()` and `step()` that only some ranks run, and for a collective that one rank "
    "skips or that loses data"
)
_WEIGHTS = (
    "{ranks} differ in the weights {{names}}, although their gradients are alike{until}. {remedy}"
)
_STARTED = "Broadcast the weights of rank 0 before training, as DistributedDataParallel does, or seed all ranks alike before the model is made"
_DRIFTED = "Look for an update, a weight decay or an assignment that only some ranks make"


@dataclass(frozen=True, slots=True)
class _Row:
    step: int
    numbers: tuple[float, ...]  # norms of gradients, then numbers of weights


@dataclass(slots=True)
class _Owner:
    place: int
    rows: list[_Row] = field(default_factory=list)
    sent: int = 0
    # By number of batch, this rank's own rows and the tensors that they are about.
    waiting: dict[int, tuple[list[_Row], Sequence[int]]] = field(default_factory=dict)
    alike: int = 0
    weights_alike: bool = False
    is_local: bool = False
    # A difference of ranks that no wrapper holds: a fault if they are alike again, else they train apart from now on.
    parted: Finding | None = None


class RanksCheck(Check):
    """Compares norms of final gradients and a few weights with those of the other ranks, waiting for nobody."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, _Owner] = {}

    def before_update(self, update: Update) -> Iterable[Finding]:
        mail = update.mail
        if mail is None:
            return ()
        owner = self._owners.setdefault(update.owner, _Owner(len(self._owners)))
        # Ranks that update alone, even once, drift apart: local SGD averages their weights now and then.
        owner.is_local |= mail.local
        if owner.is_local:
            return ()
        averaged = mail.averaged
        tensors = [
            t for t in update.tensors if t in update.groups and (t in averaged or not averaged)
        ]
        numbers = _numbers(update, tensors)
        if numbers is not None:

            def arrived(values: Tensor) -> Iterator[Finding]:
                owner.rows.append(_Row(update.step, tuple(values.tolist())))
                yield from self._exchange(owner, tensors, mail)

            update.later(numbers, arrived)
        return ()

    def _exchange(self, owner: _Owner, tensors: Sequence[int], mail: Mail) -> Iterator[Finding]:
        """Send a full batch, and compare the batches that all ranks have sent by now."""
        if len(owner.rows) < min(BATCH, 1 + owner.sent):
            return
        rows, owner.rows = owner.rows, []
        mail.post(f"{owner.place}/{owner.sent}", _packed(rows))
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
            yield from _compared(owner, mail, matched, ours, list(map(_unpacked, theirs)))


def _numbers(update: Update, tensors: Sequence[int]) -> Tensor | None:
    """Return the norms of the gradients, then one number of each weight. Shape ``[2 * n]``; -1: no gradient."""
    if not tensors:
        return None
    params = [update.params[t] for t in tensors]
    norms = [_norm(update.grads.get(t), update.params[t]) for t in tensors]
    numbers = [*norms, *(_norm(sample(param), param) for param in params)]
    return torch.stack([number.to(params[0].device) for number in numbers])


def _norm(values: Tensor | None, param: Tensor) -> Tensor:
    if values is None:
        return torch.full((), -1.0, device=param.device)
    if values.layout != torch.strided:
        values = values.coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(values, dtype=_wide(param))
    return norm.float()


def _wide(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _packed(rows: Sequence[_Row]) -> bytes:
    parts = [struct.pack(f"<qi{len(r.numbers)}f", r.step, len(r.numbers), *r.numbers) for r in rows]
    return b"".join(parts)


def _unpacked(data: bytes) -> dict[int, tuple[float, ...]]:
    rows, at = {}, 0
    while at < len(data):
        step, count = struct.unpack_from("<qi", data, at)
        rows[step] = struct.unpack_from(f"<{count}f", data, at + 12)
        at += 12 + 4 * count
    return rows


def _apart(ours: float, theirs: float) -> bool:
    # A NaN is the trap's to tell.
    finite = math.isfinite(ours) and math.isfinite(theirs)
    return finite and abs(ours - theirs) > _ROUNDING * max(abs(ours), abs(theirs))


def _compared(
    owner: _Owner,
    mail: Mail,
    tensors: Sequence[int],
    ours: Sequence[_Row],
    theirs: Sequence[dict[int, tuple[float, ...]]],
) -> Iterator[Finding]:
    count = len(tensors)
    for row in ours:
        others = {
            rank: numbers[row.step]
            for rank, numbers in zip(mail.ranks[1:], theirs, strict=True)
            if len(numbers.get(row.step, ())) == 2 * count
        }
        if len(others) < len(mail.ranks) - 1:
            continue
        until = f", alike until then for {owner.alike} updates" if owner.alike else ""
        apart = _differing(row.numbers[:count], {r: n[:count] for r, n in others.items()})
        if apart:
            remedy = _LOST if owner.alike or not mail.averaged else _BYPASSED
            said = _said(_GRADIENTS, mail, apart, until=until, remedy=remedy)
            found = Finding("gradients", said, tuple(tensors[p] for p in apart), step=row.step)
            if mail.averaged:
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
        if not apart:
            owner.weights_alike = True
        elif mail.averaged or owner.alike >= ALIKE_UPDATES:
            remedy = _DRIFTED if owner.weights_alike else _STARTED
            since = "" if owner.weights_alike else ", and had from the start"
            said = _said(_WEIGHTS, mail, apart, until=since, remedy=remedy)
            yield Finding("weights", said, tuple(tensors[place] for place in apart), step=row.step)


def _differing(
    ours: Sequence[float], theirs: dict[int, Sequence[float]]
) -> dict[int, tuple[int, float, float]]:
    """Return, by place of a tensor, the first rank that differs there, with its number and ours."""
    found: dict[int, tuple[int, float, float]] = {}
    for rank, numbers in theirs.items():
        for place, (mine, other) in enumerate(zip(ours, numbers, strict=True)):
            if _apart(mine, other):
                found.setdefault(place, (rank, other, mine))
    return found


def _said(
    template: str, mail: Mail, apart: dict[int, tuple[int, float, float]], **words: str
) -> str:
    other, theirs, ours = next(iter(apart.values()))
    first = mail.ranks[0]
    ranks = _dist.named([first, *sorted({rank for rank, _, _ in apart.values()})])
    return template.format(ranks=ranks, first=first, other=other, theirs=theirs, ours=ours, **words)
