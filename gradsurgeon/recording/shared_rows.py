"""Rows of tensors that ranks share: each rank measures its shards, and the lowest rank merges the rows.

The numbers travel in the key-value store of the job, in batches, once they are on the host. No rank waits for
another one while training goes on, and none calls a collective.
"""

from __future__ import annotations

import pickle
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers
from gradsurgeon.errors import RecordError
from gradsurgeon.store import Key
from gradsurgeon.tensors import measure

Answer = TypeVar("Answer")
# Rule, statistic, point, and a checksum of the names.
_Series = tuple[str, str, str, int]

# Seconds: the longest wait for other ranks, at the end of a session or when a person asks for a record.
LIMIT = 10.0
_PAUSE = 0.005
# A rank with this many unread batches sends no more.
_MOST_UNREAD = 256
# If this many newer rows wait behind a row, the row is merged without its missing parts.
_MOST_WAITING = 1024
# If this many rows wait, a rank checks whether other ranks have closed.
_MANY_WAITING = 16

_GIVEN_UP = (
    "not all ranks that share its parameters measured the same backward passes (one was paused, removed its session or left "
    "an update out): those steps have no record of them"
)
_FAILED = "the key-value store of the job failed ({reason}): from now on nothing is recorded of parameters that ranks share"
_ALONE = (
    "{name} is shared by {ranks}, and {absent} did not ask for this record within {limit:g} s: while a session is on, `latest` "
    "and `history` of such a parameter are collectives, so all of these ranks must call them"
)
_ELSEWHERE = "{name} is shared by {ranks}, and rank {leader} keeps its records: ask there"


class Share(NamedTuple):
    """The places in a row whose tensors the same ranks share; no ranks if this rank holds the tensors whole."""

    ranks: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The rank that merges the parts."""
        return self.ranks[0] if self.ranks else _dist.rank()


def shares(tensors: Sequence[Tensor]) -> tuple[Share, ...]:
    places_of: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        # The statistic of a tensor without elements is the same everywhere.
        places_of[_dist.sharing(tensor) if tensor.numel() else ()].append(place)
    return tuple(Share(ranks, tuple(places)) for ranks, places in places_of.items())


class PartRow(NamedTuple):
    """A row to which other ranks contribute. ``number`` counts backward passes, alike on all of them."""

    key: Key
    step: int
    number: int
    columns: Sequence[int]
    shares: tuple[Share, ...]


class WholeRow(NamedTuple):
    key: Key
    step: int
    columns: Sequence[int]
    values: Tensor


class _Part(NamedTuple):
    """The numbers of one rank for the tensors of a share in one pass: float32, row by row."""

    series: _Series
    number: int
    values: bytes


class _Waiting(NamedTuple):
    """A row of this rank, with the parts that have come, by share and rank."""

    row: PartRow
    parts: dict[tuple[Share, int], Tensor]

    def lacking(self) -> Iterator[tuple[Share, int]]:
        for share in self.row.shares:
            if share.leader == _dist.rank():
                missing = (rank for rank in share.ranks if (share, rank) not in self.parts)
                yield from ((share, rank) for rank in missing)


class SharedRows:
    """Merges the rows of shared tensors.

    Before `open` and after `close` a row has only the tensors that this rank holds whole.

    Args:
        tell: called with a topic, a rule and a text to report once.
    """

    def __init__(self, tell: Callable[[str, str, str], None]) -> None:
        self._tell = tell
        self._store: Any = None
        # Backward passes that gave a gradient to shared tensors.
        self.passes = 0
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._waiting: defaultdict[Key, deque[_Waiting]] = defaultdict(deque)
        # The parts that have come, by series and rank, oldest first, and the number of the newest pass.
        self._parts: defaultdict[tuple[_Series, int], deque[_Part]] = defaultdict(deque)
        self._newest: dict[tuple[_Series, int], int] = {}
        self._outgoing: defaultdict[int, list[_Part]] = defaultdict(list)
        self._unread: defaultdict[int, deque[int]] = defaultdict(deque)
        self._read = 0
        self._closed: set[int] = set()
        self._ending = False
        self._asked: defaultdict[int, int] = defaultdict(int)

    def open(self, prefix: str) -> None:
        """Begin to exchange parts, under a key prefix that only these ranks use."""
        if self._store is None:
            self._store = _dist.own_store(prefix)

    def take(self, row: PartRow, values: Tensor) -> None:
        """Take this rank's numbers of a row: per column as many numbers as the statistic needs from a part."""
        values = values.reshape(len(row.columns), -1)
        waiting = _Waiting(row, {})
        # The whole tensors of a row wait for the shared tensors also.
        most = max((share.ranks for share in row.shares), key=len)
        for share in row.shares:
            part = values[list(share.places)].contiguous()
            for place in share.places:
                self._ranks[row.key.names[row.columns[place]]] = share.ranks or most
            waiting.parts[share, _dist.rank()] = part.double()
            if share.leader != _dist.rank():
                series = _series(row, share)
                packed = _Part(series, row.number, _numbers.to_bytes(part))
                self._outgoing[share.leader].append(packed)
        queue = self._waiting[row.key]
        # An earlier pass may feed the same update; its row may be complete, and is replaced then.
        if queue and queue[-1].row.step == row.step:
            queue.pop()
        queue.append(waiting)

    def exchange(self) -> Iterator[WholeRow]:
        """Send this rank's parts; yield the rows that are complete by now. Waits for no other rank."""
        if self._store is not None:
            try:
                self._send()
                self._receive()
            except RuntimeError as error:
                self._fail(error)
        self._outgoing.clear()
        for queue in self._waiting.values():
            yield from self._complete(queue)

    def close(self) -> Iterator[WholeRow]:
        """End the exchange; yield the last rows. A rank with incomplete rows waits for parts, within a limit."""
        yield from self.exchange()
        if self._store is None:
            return
        self._ending = True
        with suppress(RuntimeError):
            self._store.set(f"closed/{_dist.rank()}", "")
        end = time.monotonic() + LIMIT
        while self._store is not None and any(self._waiting.values()) and time.monotonic() < end:
            time.sleep(_PAUSE)
            yield from self.exchange()
        self._store = None
        yield from self.exchange()

    def ask(self, name: str, stat: str, answer: Callable[[], Answer]) -> Answer:
        """Return the answer of the rank that merges the rows of a tensor. All ranks that share it must call this.

        Raises:
            RecordError: another rank did not ask in time, or the session is over and another rank has the records.
        """
        ranks, rank = self._ranks.get(name, ()), _dist.rank()
        leader = ranks[0] if ranks else rank
        if not ranks or (self._store is None and rank == leader):
            return answer()
        if self._store is None:
            text = _ELSEWHERE.format(name=name, ranks=_dist.named(ranks), leader=leader)
            raise RecordError(text)
        self._asked[leader] += 1
        key = f"asked/{leader}/{self._asked[leader]}/{name}/{stat}"
        try:
            if rank == leader:
                return self._answer(key, name, ranks, answer)
            self._store.set(f"{key}/{rank}", "")
            self._await(key, name, ranks, [leader])
            found, error = pickle.loads(self._store.get(f"{key}/{leader}"))  # noqa: S301 # the ranks of a job trust each other
        except RuntimeError as failure:
            raise RecordError(_FAILED.format(reason=_told(failure))) from None
        if error is not None:
            raise error
        return cast("Answer", found)

    def _answer(
        self, key: str, name: str, ranks: Sequence[int], answer: Callable[[], Answer]
    ) -> Answer:
        found, error = None, None
        try:
            self._await(key, name, ranks, ranks[1:])
            found = answer()
        except (KeyError, RecordError) as caught:
            error = caught
        self._store.set(f"{key}/{ranks[0]}", cast("Any", pickle.dumps((found, error))))
        for rank in ranks[1:]:
            self._store.delete_key(f"{key}/{rank}")
        if error is not None:
            raise error
        return cast("Answer", found)

    def _await(self, key: str, name: str, ranks: Sequence[int], wanted: Sequence[int]) -> None:
        end = time.monotonic() + LIMIT
        while missing := [rank for rank in wanted if not self._store.check([f"{key}/{rank}"])]:
            if time.monotonic() > end:
                absent = _dist.named(missing)
                text = _ALONE.format(
                    name=name, ranks=_dist.named(ranks), absent=absent, limit=LIMIT
                )
                raise RecordError(text)
            time.sleep(_PAUSE)

    def _send(self) -> None:
        for leader, parts in self._outgoing.items():
            unread = self._unread[leader]
            read = int(self._store.add(f"{leader}/read", 0))
            while unread and unread[0] <= read:
                self._store.delete_key(f"{leader}/{unread.popleft()}")
            if len(unread) < _MOST_UNREAD:
                ticket = int(self._store.add(f"{leader}/sent", 1))
                self._store.set(
                    f"{leader}/{ticket}", cast("Any", pickle.dumps((_dist.rank(), parts)))
                )
                unread.append(ticket)

    def _receive(self) -> None:
        waiting = [row for queue in self._waiting.values() for row in queue]
        if not waiting:
            return
        rank, closed = _dist.rank(), set[int]()
        if self._ending or len(waiting) > _MANY_WAITING:
            # Checked before the batches are read: a rank closes after it has sent its last batch.
            awaited = {other for _, other in waiting[0].lacking()}
            closed = {other for other in awaited if self._store.check([f"closed/{other}"])}
        sent = int(self._store.add(f"{rank}/sent", 0))
        tickets = [f"{rank}/{ticket}" for ticket in range(self._read + 1, sent + 1)]
        # A rank draws a ticket before it writes its batch.
        while tickets and not self._store.check(tickets):
            tickets.pop()
        for ticket in tickets:
            sender, parts = pickle.loads(self._store.get(ticket))  # noqa: S301 # as above
            for part in parts:
                self._parts[part.series, sender].append(part)
                self._newest[part.series, sender] = part.number
        if tickets:
            self._read += len(tickets)
            self._store.add(f"{rank}/read", len(tickets))
        self._closed = closed

    def _complete(self, queue: deque[_Waiting]) -> Iterator[WholeRow]:
        while queue:
            waiting = queue[0]
            awaited = [pair for pair in list(waiting.lacking()) if self._may_come(waiting, *pair)]
            if awaited and len(queue) < _MOST_WAITING:
                return
            yield from self._merged(queue.popleft())

    def _may_come(self, waiting: _Waiting, share: Share, rank: int) -> bool:
        """Store the part of a rank if it has come; tell whether it is missing and may still come."""
        number, series = waiting.row.number, (_series(waiting.row, share), rank)
        parts = self._parts[series]
        while parts and parts[0].number < number:
            parts.popleft()
        if parts and parts[0].number == number:
            shape = len(share.places), -1
            numbers = torch.frombuffer(bytearray(parts.popleft().values), dtype=torch.float32)
            waiting.parts[share, rank] = numbers.reshape(shape).double()
            return False
        gone = self._store is None or rank in self._closed
        return not gone and self._newest.get(series, -1) < number

    def _merged(self, waiting: _Waiting) -> Iterator[WholeRow]:
        """Yield the columns of a row that this rank holds whole, or can merge."""
        row, found = waiting.row, dict[int, Tensor]()
        lacking = {share for share, _ in waiting.lacking()}
        if lacking and self._store is not None:
            self._tell("shared rows", row.key.rule, _GIVEN_UP)
        merge = measure.merge_of(row.key.stat)
        for share in row.shares:
            if share.leader == _dist.rank() and share not in lacking:
                parts = [waiting.parts[share, rank] for rank in share.ranks or (_dist.rank(),)]
                found.update(zip(share.places, merge(torch.stack(parts)).unbind(), strict=True))
        if found:
            places = sorted(found)
            values = torch.stack([found[place] for place in places]).float()
            yield WholeRow(row.key, row.step, [row.columns[place] for place in places], values)

    def _fail(self, error: RuntimeError) -> None:
        self._store = None
        self._tell("shared rows failed", "", _FAILED.format(reason=_told(error)))


def _told(error: RuntimeError) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _series(row: PartRow, share: Share) -> _Series:
    names = "\0".join(row.key.names[row.columns[place]] for place in share.places)
    checksum = zlib.crc32(names.encode("utf-8", "surrogatepass"))
    return row.key.rule, row.key.stat, row.key.point, checksum
