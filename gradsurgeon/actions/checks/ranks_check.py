"""Finds ranks whose gradients or weights differ although they should be replicas of one another."""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Check, Finding, Replicas, Update
from gradsurgeon.actions.checks.replica_comparison import RankNumbers, ReplicaComparison
from gradsurgeon.tensors import _numbers
from gradsurgeon.tensors._channel import Channel, numbered
from gradsurgeon.tensors.sampling import by_device, norms_and_sums, sample

# Rows are sent so many together.
_BATCH = 8
# Up to so many ranks, each sends its first rows one by one, and later also shows a batch that is not complete yet.
_FEW_RANKS = 64
_FIRST = 32
# So many rows of the first rank wait for other ranks.
_MOST_WAITING = 256
# After so many passes, one row in eight has samples: a difference of weights stays.
_SETTLED = 32
_LATER = 8

_Passes = tuple[int, int]
# A row on its way: passes, step, and the numbers as bytes.
_Packed = tuple[_Passes, int, bytes]


def topic_of(rule: str, names: Sequence[str]) -> str:
    """Return the topic of the next session that has a rule for these parameters, the same on all ranks."""
    number = zlib.crc32("\n".join([rule, *names]).encode())
    return numbered(f"replicas/{number}")


class RanksCheck(Check):
    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    def before_edits(self, update: Update) -> Iterable[Finding]:
        if not update.topic:
            return ()
        for replicas in update.replicas:
            if replicas.key not in self._series:
                self._series[replicas.key] = _Series(replicas, update.topic)
            series = self._series[replicas.key]
            # A closure may be evaluated away from the weights that ranks have in common.
            is_sampled = not update.has_moved and _has_samples(replicas.passes)
            values = _measured(update, replicas.indices, is_sampled=is_sampled)
            update.later(values, partial(series.add, replicas, update.step))
        return ()

    def at_end(self) -> Iterator[Finding]:
        for series in self._series.values():
            yield from series.close()


class _Series:
    """The rows of some replicas: each rank sends its own, and the first rank compares them."""

    def __init__(self, replicas: Replicas, topic: str) -> None:
        self._channel = Channel(f"{topic}/{replicas.key}", replicas.ranks)
        self._first, *self._others = replicas.ranks
        self._are_few = len(replicas.ranks) <= _FEW_RANKS
        self._indices = replicas.indices
        self._batch: list[RankNumbers] = []
        self._sent = 0
        # What follows is for the first rank: the rows that wait, by passes and rank, and the replicas of its own rows.
        self._rows: dict[_Passes, dict[int, RankNumbers]] = {}
        self._replicas: dict[_Passes, Replicas] = {}
        # By other rank, the passes of its last row.
        self._last = dict.fromkeys(self._others, (-1, -1))
        self._comparison = ReplicaComparison(replicas.ranks, replicas.indices)

    def add(self, replicas: Replicas, step: int, values: Tensor) -> Iterator[Finding]:
        """Add the row of an update of this rank."""
        row = RankNumbers(replicas.passes, step, values.T.contiguous())
        self._batch.append(row)
        is_complete = len(self._batch) >= self._batch_size
        # Without a store the ranks cannot be compared.
        with suppress(RuntimeError):
            if self._is_first:
                self._keep(self._first, row)
                self._replicas.setdefault(row.passes, replicas)
                # Another rank may be ahead: its later batches wait in the store.
                while is_complete and min(self._last.values()) < row.passes:
                    if not self._receive(self._others):
                        break
            elif is_complete:
                self._channel.post(self._first, self._packed())
            elif self._are_few:
                self._show_rest()
        if is_complete:
            self._batch = []
            self._sent += 1
            yield from self._compared(min(row.passes, *self._last.values()))

    @property
    def _batch_size(self) -> int:
        if self._are_few and self._sent < _FIRST:
            return 1
        return _BATCH

    def _keep(self, rank: int, row: RankNumbers) -> None:
        self._rows.setdefault(row.passes, {}).setdefault(rank, row)
        while len(self._rows) > _MOST_WAITING:
            oldest = min(self._rows)
            del self._rows[oldest]
            self._replicas.pop(oldest, None)

    def close(self) -> Iterator[Finding]:
        """Send the last rows, or compare what the other ranks have sent so far."""
        with suppress(RuntimeError):
            if self._is_first:
                for rank in self._others:
                    self._receive_all(rank)
            elif self._batch:
                self._show_rest()
        self._channel.close()
        yield from self._compared(max(self._rows, default=(0, 0)))

    @property
    def _is_first(self) -> bool:
        return self._channel.rank == self._first

    def _packed(self) -> list[_Packed]:
        return [(row.passes, row.step, _numbers.to_bytes(row.numbers)) for row in self._batch]

    def _show_rest(self) -> None:
        """Show a batch that is not complete: the first rank may end before it is."""
        self._channel.set(f"last/{self._channel.rank}", self._packed())

    def _receive(self, ranks: Sequence[int]) -> bool:
        """Take in the next batch of each of some ranks; tell whether all of these had come."""
        batches = self._channel.take(ranks)
        if batches is None:
            return False
        for rank, batch in zip(ranks, batches, strict=True):
            self._take_in(rank, batch)
        return True

    def _receive_all(self, rank: int) -> None:
        while self._receive([rank]):
            pass
        if self._channel.check(f"last/{rank}"):
            self._take_in(rank, self._channel.get(f"last/{rank}"))

    def _take_in(self, rank: int, batch: Sequence[_Packed]) -> None:
        for passes, step, content in batch:
            numbers = torch.frombuffer(bytearray(content), dtype=torch.float32)
            self._keep(rank, RankNumbers(passes, step, numbers.view(4, -1)))
            self._last[rank] = passes

    def _compared(self, last: _Passes) -> Iterator[Finding]:
        """Compare the rows up to some passes. A rank that skipped an update has no row for it."""
        for passes in sorted(self._rows):
            if passes > last:
                break
            rows = self._rows.pop(passes)
            own = rows.pop(self._first, None)
            if own is not None:
                yield from self._comparison.compare(own, rows, self._replicas.pop(passes))


def _has_samples(passes: _Passes) -> bool:
    """Tell whether a row has samples of gradients and weights. All ranks choose alike for the same passes."""
    # Drawn: passes may come in fours.
    return sum(passes) <= _SETTLED or zlib.crc32(repr(passes).encode()) % _LATER == 0


def _measured(update: Update, indices: Sequence[int], *, is_sampled: bool) -> Tensor:
    """Return the numbers of a row by parameter, NaN for what is not measured. Shape ``[parameters, 4]``."""
    device = update.params[indices[0]].device
    # A missing gradient counts as zero.
    zero = torch.zeros((), device=device)
    norms = dict.fromkeys(indices, zero)
    for group in by_device([index for index in indices if index in update.grads], update.grads):
        norms |= zip(group, update.norms(group).to(device).unbind(), strict=True)
    column = torch.stack([*norms.values()]).unsqueeze(1)
    if not is_sampled:
        return torch.nn.functional.pad(column, (0, 3), value=math.nan)
    grads = []
    weights = []
    for index in indices:
        grad = update.grads.get(index, zero)
        if grad.layout is not torch.strided:
            grad = zero + math.nan
        grads.append(sample(grad).to(device))
        weights.append(sample(update.params[index]).to(device))
    return torch.cat([column, norms_and_sums(grads)[:, 1:], norms_and_sums(weights)], 1)
