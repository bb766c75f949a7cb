"""Finds ranks whose gradients or weights differ although they should be replicas of one another."""

import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Check, Findings, Pass, Replicas, Update
from gradsurgeon.actions.checks.replica_comparison import RankNumbers, ReplicaComparison
from gradsurgeon.actions.checks.same_data import SameData, numbers_of
from gradsurgeon.tensors import _numbers
from gradsurgeon.tensors._channel import Channel, numbered
from gradsurgeon.tensors.sampling import by_device, norms_and_sums, sample

# With more ranks, one update in so many is compared: a difference of weights stays.
_FEW_RANKS = 64
_ONE_IN = 8
# So many rows of the first rank wait for other ranks.
_MOST_WAITING = 256
# Seconds: the longest wait for the rows of other ranks at the end of a session.
LIMIT = 5.0

_Passes = tuple[int, int]


def topic_of(rule: str, names: Sequence[str]) -> str:
    """Return the topic of the next session that has a rule for these parameters, the same on all ranks."""
    number = zlib.crc32("\n".join([rule, *names]).encode())
    return numbered(f"replicas/{number}")


class RanksCheck(Check):
    compares_ranks = True

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}
        # The numbers of the data of the last pass.
        self._data: Tensor | None = None

    def after_pass(self, done: Pass) -> Findings:
        self._data = numbers_of(done)
        return ()

    def before_edits(self, update: Update) -> Findings:
        for replicas in update.replicas:
            # A closure may be evaluated away from the weights that ranks have in common.
            if update.has_moved or not _is_compared(replicas):
                continue
            if replicas.key not in self._series:
                self._series[replicas.key] = _Series(replicas, update.topic)
            series = self._series[replicas.key]
            values = _measured(update, replicas.indices, self._data)
            update.later(values, partial(series.add, replicas, update.step))
        return ()

    def at_end(self) -> Findings:
        for series in self._series.values():
            yield from series.close()


class _Series:
    """The rows of some replicas: each rank sends its own, and the first rank compares them."""

    def __init__(self, replicas: Replicas, topic: str) -> None:
        self._channel = Channel(f"{topic}/{replicas.key}", replicas.ranks)
        self._first, *self._others = replicas.ranks
        # Only the first rank fills these: the rows that wait, by passes and rank, and the replicas of its own rows.
        self._rows: dict[_Passes, dict[int, RankNumbers]] = {}
        self._replicas: dict[_Passes, Replicas] = {}
        # Maps each other rank to the passes of its last row.
        self._last = dict.fromkeys(self._others, (-1, -1))
        self._comparison = ReplicaComparison(replicas.ranks, replicas.indices)
        self._same_data = SameData(replicas.ranks)

    def add(self, replicas: Replicas, step: int, values: Tensor) -> Findings:
        """Add the row of an update of this rank."""
        row = _row(replicas.passes, step, values.T)
        # Without a store the ranks cannot be compared.
        with suppress(RuntimeError):
            if not self._is_first:
                content = _numbers.to_bytes(values.T)
                self._channel.post(self._first, (row.passes, row.step, content))
                return
            self._keep(self._first, row)
            self._replicas.setdefault(row.passes, replicas)
            # Another rank may be ahead: its later rows wait in the store.
            while min(self._last.values()) < row.passes and self._receive(self._others):
                pass
        yield from self._compared(min(row.passes, *self._last.values()))

    def _keep(self, rank: int, row: RankNumbers) -> None:
        self._rows.setdefault(row.passes, {}).setdefault(rank, row)
        while len(self._rows) > _MOST_WAITING:
            oldest = min(self._rows)
            del self._rows[oldest]
            self._replicas.pop(oldest, None)

    def close(self) -> Findings:
        """Compare what the other ranks send until they leave. Those that are behind have `LIMIT` seconds for it."""
        with suppress(RuntimeError):
            if self._is_first:
                self._receive_all()
                if min(self._last.values()) < max(self._rows, default=(-1, -1)):
                    self._channel.present("left", self._others, LIMIT)
                    self._receive_all()
        self._channel.close()
        yield from self._compared(max(self._rows, default=(0, 0)))

    def _receive_all(self) -> None:
        for rank in self._others:
            while self._receive([rank]):
                pass

    @property
    def _is_first(self) -> bool:
        return self._channel.rank == self._first

    def _receive(self, ranks: Sequence[int]) -> bool:
        """Take in the next row of each of some ranks; tell whether all of these had come."""
        messages = self._channel.take(ranks)
        if messages is None:
            return False
        for rank, (passes, step, content) in zip(ranks, messages, strict=True):
            numbers = torch.frombuffer(bytearray(content), dtype=torch.float32)
            self._keep(rank, _row(passes, step, numbers.view(4, -1)))
            self._last[rank] = passes
        return True

    def _compared(self, last: _Passes) -> Findings:
        """Compare the rows up to some passes. A rank that skipped an update has no row for it."""
        for passes in sorted(self._rows):
            if passes > last:
                break
            rows = self._rows.pop(passes)
            own = rows.pop(self._first, None)
            if own is None:
                continue
            replicas = self._replicas.pop(passes)
            if replicas.promised and len(rows) == len(self._others):
                data = [row.data for row in rows.values()]
                yield from self._same_data.compare(own.step, own.data, data)
            yield from self._comparison.compare(own, rows, replicas)


def _row(passes: _Passes, step: int, numbers: Tensor) -> RankNumbers:
    return RankNumbers(passes, step, numbers[:, :-1], numbers[:, -1])


def _is_compared(replicas: Replicas) -> bool:
    """Tell whether an update is compared. All ranks choose alike for the same passes."""
    if len(replicas.ranks) <= _FEW_RANKS:
        return True
    # Drawn: passes may come in fours.
    return zlib.crc32(repr(replicas.passes).encode()) % _ONE_IN == 0


def _measured(update: Update, indices: Sequence[int], data: Tensor | None) -> Tensor:
    """Return the numbers of a row by parameter, and those of the data. Shape ``[parameters + 1, 4]``."""
    device = update.params[indices[0]].device
    # A missing gradient counts as zero.
    zero = torch.zeros((), device=device)
    norms = dict.fromkeys(indices, zero)
    with_grad = [index for index in indices if index in update.grads]
    for group in by_device(with_grad, update.grads):
        norms |= zip(group, update.norms(group).to(device).unbind(), strict=True)
    column = torch.stack([*norms.values()]).unsqueeze(1)
    grads = []
    weights = []
    for index in indices:
        grad = update.grads.get(index, zero)
        if grad.layout is not torch.strided:
            grad = zero  # Its norm is compared.
        grads.append(sample(grad).to(device))
        weights.append(sample(update.params[index]).to(device))
    rows = torch.cat([column, norms_and_sums(grads)[:, 1:], norms_and_sums(weights)], 1)
    if data is None:
        data = torch.full((4,), torch.nan)
    return torch.cat([rows, data.to(device).unsqueeze(0)])
