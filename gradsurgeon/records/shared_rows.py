"""Rows of measurements on their way; of tensors that ranks share, the lowest rank merges the rows of all."""

import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from gradsurgeon.errors import RecordError, reason_of
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.layout import pack_absent
from gradsurgeon.records.store.memory import RecordedRow
from gradsurgeon.tensors import _dist, _numbers, measure
from gradsurgeon.tensors._channel import Channel

Answer = TypeVar("Answer")
# Rule, statistic, point, and a checksum of the names.
_Series = tuple[str, str, str, int]
# The numbers that one rank has measured of the tensors of a share.
_Part = list[list[float]]
# Seconds: the longest wait for other ranks, at the end of a session or when a person asks for a record.
LIMIT = 10.0
_PAUSE = 0.005
# If this many newer rows wait behind a row, the row is merged without its missing parts.
_MOST_WAITING = 1024
_GIVEN_UP = (
    "not all ranks that share its parameters measured the same backward passes (one was paused, removed its session or left "
    "an update out): those steps have no record of them"
)
REMEDY = "apply the same rules on all ranks, with the same `mode` and `start_step`"
UNRECORDED = f"records nothing of parameters that ranks share; {REMEDY}"
_APART = "no rank has the numbers of all its gradients, so there is no number of all together: write `per: parameter`"
_UNASKED = (
    "{shared}, and {named} did not ask for this record within {limit:g} s: all of these ranks must call `latest` and `history` "
    "of it while a session is on"
)
_FAILED = "the key-value store of the job failed ({reason}): from now on nothing is recorded of parameters that ranks share"


# The places in a row by the ranks that share their tensors; by no ranks if this rank holds the tensors whole.
Shares = Mapping[tuple[int, ...], Sequence[int]]


def shares(tensors: Sequence[Tensor]) -> Shares:
    places_of = defaultdict(list)
    for place, tensor in enumerate(tensors):
        # The statistic of a tensor without elements is the same everywhere.
        ranks = _dist.sharing(tensor) if tensor.numel() else ()
        places_of[ranks].append(place)
    return places_of


class PendingRow(NamedTuple):
    """A row on its way, without its numbers. `columns` ascend; `number` counts backward passes, alike on all ranks.

    With `joined`, the numbers become one in this series, once all of them are here.
    """

    key: Key
    step: int
    columns: Sequence[int]
    replace: bool = False
    sources: Sequence[object] = ()
    shares: Shares = MappingProxyType({})
    number: int = 0
    joined: Key | None = None

    def measured(self, values: Tensor) -> RecordedRow:
        """Return the row with its numbers: one float32 per name of the key, and the columns without a value."""
        width = len(self.key.names)
        absent = None
        if len(self.columns) < width:
            # Scripts may set another default dtype or default device.
            whole = torch.zeros(width, dtype=torch.float32, device="cpu")
            whole[torch.tensor(self.columns, device="cpu")] = values
            values = whole
            absent = pack_absent({*range(width)}.difference(self.columns), width)
        return RecordedRow(self.key, self.step, _numbers.to_bytes(values), absent, self.replace)


MeasuredRow = tuple[PendingRow, Tensor]


# The ranks and columns of a share of a row that this rank leads, its series, and the numbers of this rank.
_Piece = tuple[tuple[int, ...], Sequence[int], _Series, _Part]


# Returns the channel of the ranks that share tensors, or which of them lack the rules; ``None`` if not all of them come
# within some seconds. Without a limit the search ends.
Search = Callable[[float | None], Channel | str | None]


class SharedRows:
    """Merges the rows of shared tensors over a channel. No rank waits for another in training."""

    def __init__(self, notify: Callable[[str, str, str], None]) -> None:
        self._notify = notify
        # The process group may be newer than the session, and gone at its end.
        self._rank = _dist.rank()
        self._channel: Channel | None = None
        self._search: Search | None = None
        # Whether all ranks began to exchange after the same backward pass, so that they can call collectives together.
        self.together = False
        # Backward passes that gave a gradient to shared tensors.
        self.passes = 0
        self._ranks: dict[str, tuple[int, ...]] = {}
        # The rows of each series that lack parts of other ranks, with the numbers of this rank.
        self._waiting = defaultdict[Key, deque[tuple[PendingRow, list[_Piece]]]](deque)
        # The ranks that send parts to this one, and those of them that have ended.
        self._senders = set[int]()
        self._closed = set[int]()
        # The parts that have come, by series and pass, then by rank; and the newest pass of each series and rank.
        self._parts = defaultdict[_Series, dict[int, dict[int, _Part]]](dict)
        self._newest: dict[tuple[_Series, int], int] = {}
        # The parts to send, by rank.
        self._outgoing = defaultdict[int, list[tuple[_Series, int, _Part]]](list)
        # The records asked of each rank so far.
        self._asked = Counter[int]()

    def open(self, channel: Channel) -> None:
        """Begin to exchange parts over a channel that only these ranks use, and all of them from this pass on."""
        self._channel = channel
        self._rank = channel.rank
        self.together = True

    def seek(self, search: Search) -> None:
        """Begin to exchange parts once the other ranks are found. Until then the rows wait."""
        self._search = search

    def _find_ranks(self, limit: float | None) -> None:
        """Look for the other ranks, for some seconds at most. Without a limit the search ends."""
        if self._search is None:
            return
        channel_or_obstacle = self._search(limit)
        if channel_or_obstacle is None:
            return
        self._search = None
        if isinstance(channel_or_obstacle, Channel):
            self._channel = channel_or_obstacle
        elif limit is not None or any(self._waiting.values()):
            self._notify("shared rows", "", f"{channel_or_obstacle}: this rank {UNRECORDED}")

    def add(self, row: PendingRow, values: Tensor) -> None:
        """Take this rank's numbers of a row: per column as many numbers as the statistic needs from a part."""
        values = values.reshape(len(row.columns), -1)
        # The whole tensors of a row wait for the shared tensors also.
        pieces = list[_Piece]()
        most = max(row.shares, key=len)
        if row.joined is not None:
            self._ranks[row.joined.names[0]] = most
        for ranks, places in row.shares.items():
            columns = [row.columns[place] for place in places]
            names = [row.key.names[column] for column in columns]
            series = (*row.key[:3], zlib.crc32(repr(names).encode()))
            part = values[places].tolist()
            self._ranks.update(dict.fromkeys(names, ranks or most))
            if not ranks or ranks[0] == self._rank:
                self._senders.update(ranks[1:])
                pieces.append((ranks, columns, series, part))
            else:
                self._outgoing[ranks[0]].append((series, row.number, part))
        queue = self._waiting[row.key]
        # An earlier pass may feed the same update; its row may be complete, and is replaced then.
        if queue and queue[-1][0].step == row.step:
            queue.pop()
        queue.append((row, pieces))

    def exchange(self) -> Iterator[MeasuredRow]:
        """Send this rank's parts; yield the rows that are complete by now. Waits for no other rank."""
        self._find_ranks(0.0)
        if self._channel is not None:
            try:
                for reader, parts in self._outgoing.items():
                    self._channel.post(reader, parts)
                self._receive(self._channel)
            except RuntimeError as error:
                self._channel = None
                self._notify("shared rows failed", "", _FAILED.format(reason=reason_of(error)))
        if any(len(queue) >= _MOST_WAITING for queue in self._waiting.values()):
            self._find_ranks(None)
        if self._search is None:
            self._outgoing.clear()
        for queue in self._waiting.values():
            while queue and (len(queue) >= _MOST_WAITING or not self._is_awaited(*queue[0])):
                yield from self._merged(*queue.popleft())

    def close(self) -> Iterator[MeasuredRow]:
        """End the exchange; yield the last rows. A rank with incomplete rows waits for parts, within a limit."""
        self._find_ranks(0.0)
        self._find_ranks(None)
        yield from self.exchange()
        end = time.monotonic() + LIMIT
        while self._channel is not None and any(self._waiting.values()) and time.monotonic() < end:
            time.sleep(_PAUSE)
            yield from self.exchange()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            yield from self.exchange()

    def ask(self, name: str, stat: str, answer: Callable[[], Answer]) -> Answer:
        """Return the answer of the rank that merges the rows of a tensor. All ranks that share it must call this.

        It raises `RecordError` if another rank did not ask in time, or has the records of a session that is over.
        """
        ranks = self._ranks.get(name)
        if not ranks:
            return answer()
        self._find_ranks(LIMIT)
        leader = ranks[0]
        channel = self._channel
        if channel is None and leader == self._rank:
            return answer()
        shared = f"{name} is shared by {_dist.named(ranks)}"
        if channel is None:
            raise RecordError(f"{shared}, and rank {leader} keeps its records: ask there")
        self._asked[leader] += 1
        key = f"asked/{leader}/{self._asked[leader]}/{name}/{stat}"
        answers = list[Any]()
        try:
            channel.go_on()
            absent = set(ranks).difference(channel.meet(key, None, ranks, LIMIT))
            if absent:
                named = _dist.named(sorted(absent))
                raise RecordError(_UNASKED.format(shared=shared, named=named, limit=LIMIT))
            if leader == self._rank:
                try:
                    channel.set(f"{key}/answer", answer())
                except (KeyError, RecordError) as error:
                    channel.set(f"{key}/answer", error)
            answers.append(channel.get(f"{key}/answer"))
        except RuntimeError as failure:
            raise RecordError(_FAILED.format(reason=reason_of(failure))) from None
        if isinstance(answers[0], Exception):
            # Its traceback refers to this frame, and so to all that the caller holds: the frame must not refer to it.
            raise answers.pop()
        return cast("Answer", answers.pop())

    def _receive(self, channel: Channel) -> None:
        if not any(self._waiting.values()):
            return
        for sender in self._senders - self._closed:
            # Asked before the batches are read: a rank leaves after it has sent its last batch.
            if channel.check(f"left/{sender}"):
                self._closed.add(sender)
            while batches := channel.take([sender]):
                for series, number, part in batches[0]:
                    self._parts[series].setdefault(number, {})[sender] = part
                    self._newest[series, sender] = number

    def _is_awaited(self, row: PendingRow, pieces: Sequence[_Piece]) -> bool:
        """Tell whether a part of another rank is missing and may still come."""
        if self._channel is None and self._search is None:
            return False
        for ranks, _, series, _ in pieces:
            for rank in set(ranks[1:]) - self._closed:
                if self._newest.get((series, rank), -1) < row.number:
                    return True
        return False

    def _whole_numbers(self, row: PendingRow, pieces: Sequence[_Piece]) -> dict[int, float]:
        """Return the numbers of a row by column, of the tensors whose ranks have all sent their parts."""
        numbers: dict[int, float] = {}
        merge = measure.merge_of(row.key.stat)
        for ranks, columns, series, own in pieces:
            by_pass = self._parts[series]
            by_rank = {**by_pass.get(row.number, {}), self._rank: own}
            # A row of an earlier pass was replaced, or is complete.
            for number in tuple(by_pass):
                if number <= row.number:
                    del by_pass[number]
            if len(by_rank) >= len(ranks):
                parts = [by_rank[rank] for rank in sorted(by_rank)]
                whole = merge(torch.tensor(parts, dtype=torch.float64, device="cpu"))
                numbers.update(zip(columns, whole.tolist(), strict=True))
            elif self._channel is not None:
                self._notify("shared rows", row.key.rule, _GIVEN_UP)
        return numbers

    def _merged(self, row: PendingRow, pieces: Sequence[_Piece]) -> Iterator[MeasuredRow]:
        """Yield the columns of a row that this rank holds whole, or can merge."""
        numbers = self._whole_numbers(row, pieces)
        if not numbers:
            return
        present = sorted(numbers)
        merged = [numbers[column] for column in present]
        values = torch.tensor(merged, dtype=torch.float32, device="cpu")
        if row.joined is None:
            yield PendingRow(row.key, row.step, present, replace=True), values
        elif len(present) == len(row.columns):
            whole = measure.joined(row.key.stat, values)
            yield PendingRow(row.joined, row.step, (0,), replace=True), whole
        elif len({ranks[0] for ranks in row.shares if ranks}) > 1:
            self._notify("joined rows", row.key.rule, _APART)
