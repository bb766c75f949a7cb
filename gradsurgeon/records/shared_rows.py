"""Rows of measurements on their way; of tensors that ranks share, the lowest rank merges the rows of all."""

import pickle
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from gradsurgeon.errors import RecordError, reason_of
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.layout import pack_absent
from gradsurgeon.records.store.memory import RecordedRow
from gradsurgeon.tensors import _dist, _job_store, _numbers, measure

Answer = TypeVar("Answer")
# Rule, statistic, point, and a checksum of the names.
_Series = tuple[str, str, str, int]
# Of the tensors of a share, the numbers that one rank has measured.
_Part = list[list[float]]
# Seconds: the longest wait for other ranks, at the end of a session or when a person asks for a record.
LIMIT = 10.0
_PAUSE = 0.005
# A rank that has not read this many batches of another rank gets no more from it.
_MOST_UNREAD = 256
# If this many newer rows wait behind a row, the row is merged without its missing parts.
_MOST_WAITING = 1024
_GIVEN_UP = (
    "not all ranks that share its parameters measured the same backward passes (one was paused, removed its session or left "
    "an update out): those steps have no record of them"
)
_FAILED = "the key-value store of the job failed ({reason}): from now on nothing is recorded of parameters that ranks share"


class Share(NamedTuple):
    """The places in a row whose tensors the same ranks share; no ranks if this rank holds the tensors whole."""

    ranks: tuple[int, ...]
    places: tuple[int, ...]

    def is_led_by(self, rank: int) -> bool:
        return not self.ranks or self.ranks[0] == rank


def shares(tensors: Sequence[Tensor]) -> tuple[Share, ...]:
    if not tensors:
        return ()
    places_of: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        # The statistic of a tensor without elements is the same everywhere.
        places_of[_dist.sharing(tensor) if tensor.numel() else ()].append(place)
    return tuple(Share(ranks, tuple(places)) for ranks, places in places_of.items())


class PendingRow(NamedTuple):
    """A row on its way, without its numbers. `columns` ascend; `number` counts backward passes, alike on all ranks."""

    key: Key
    step: int
    columns: Sequence[int]
    replace: bool = False
    sources: Sequence[object] = ()
    shares: tuple[Share, ...] = ()
    number: int = 0

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


class Found(NamedTuple):
    """The keys of the ranks that share some tensors, or the reason why these ranks cannot exchange rows."""

    store: _job_store.OwnStore
    problem: str = ""


class Search(Protocol):
    """Looks for the ranks that share tensors, in the key-value store of the job."""

    def find(self, limit: float) -> Found | None:
        """Return what came of the search, ``None`` if not all ranks come within some seconds."""

    def leave(self) -> str:
        """End the search; return which ranks are missing."""


class SharedRows:
    """Merges the rows of shared tensors by the key-value store of the job. No rank waits for another in training."""

    def __init__(self, tell: Callable[[str, str, str], None]) -> None:
        self._notify = tell
        # The process group may be newer than the session, and gone at its end.
        self._rank = _dist.rank()
        self._store: _job_store.OwnStore | None = None
        self._search: Search | None = None
        # Whether all ranks began to exchange after the same backward pass, so that they can call collectives together.
        self.together = False
        # Backward passes that gave a gradient to shared tensors.
        self.passes = 0
        self._ranks: dict[str, tuple[int, ...]] = {}
        # The rows of each series that lack parts of other ranks, with the numbers of this rank.
        self._waiting: defaultdict[Key, deque[tuple[PendingRow, Tensor]]] = defaultdict(deque)
        # The ranks that send parts to this one, and those of them that have ended.
        self._senders: set[int] = set()
        self._closed: set[int] = set()
        # The parts that have come, by series and rank, each with the number of its pass. They come in order.
        self._parts: defaultdict[tuple[_Series, int], dict[int, _Part]] = defaultdict(dict)
        # The parts to send, by rank.
        self._outgoing: defaultdict[int, list[tuple[_Series, int, _Part]]] = defaultdict(list)
        # By rank, the number of batches sent to it and read from it, and of the records asked of it.
        self._sent: Counter[int] = Counter()
        self._read: Counter[int] = Counter()
        self._asked: Counter[int] = Counter()

    def open(self, store: _job_store.OwnStore) -> None:
        """Begin to exchange parts, under keys that only these ranks use, and all of them from this pass on."""
        if self._store is None:
            self._store = store
            self.together = True
            self._rank = _dist.rank()

    def seek(self, search: Search) -> None:
        """Begin to exchange parts once the other ranks are found. Until then the rows wait."""
        if self._store is None and self._search is None:
            self._search = search
            self._rank = _dist.rank()

    def _find_ranks(self, limit: float) -> None:
        """Look for the other ranks, for some seconds at most."""
        found = None if self._search is None else self._search.find(limit)
        if found is None:
            return
        self._search = None
        if found.problem:
            self._notify("shared rows", "", found.problem)
        else:
            self._store = found.store

    def _give_up(self) -> None:
        """End the search for the other ranks, if it is not over."""
        search = self._search
        self._search = None
        if search is not None:
            problem = search.leave()
            if any(self._waiting.values()):
                self._notify("shared rows", "", problem)

    def add(self, row: PendingRow, values: Tensor) -> None:
        """Take this rank's numbers of a row: per column as many numbers as the statistic needs from a part."""
        values = values.reshape(len(row.columns), -1)
        # The whole tensors of a row wait for the shared tensors also.
        most = max((share.ranks for share in row.shares), key=len)
        for share in row.shares:
            for place in share.places:
                self._ranks[row.key.names[row.columns[place]]] = share.ranks or most
            if share.is_led_by(self._rank):
                self._senders.update(share.ranks[1:])
            else:
                part = values[list(share.places)].tolist()
                self._outgoing[share.ranks[0]].append((_series(row, share), row.number, part))
        queue = self._waiting[row.key]
        # An earlier pass may feed the same update; its row may be complete, and is replaced then.
        if queue and queue[-1][0].step == row.step:
            queue.pop()
        queue.append((row, values))

    def exchange(self) -> Iterator[tuple[PendingRow, Tensor]]:
        """Send this rank's parts; yield the rows that are complete by now. Waits for no other rank."""
        self._find_ranks(0.0)
        if self._store is not None:
            try:
                self._send(self._store)
                self._receive(self._store)
            except RuntimeError as error:
                self._store = None
                self._notify("shared rows failed", "", _FAILED.format(reason=reason_of(error)))
        if any(len(queue) >= _MOST_WAITING for queue in self._waiting.values()):
            self._give_up()
        if self._search is None:
            self._outgoing.clear()
        for queue in self._waiting.values():
            while queue and (len(queue) >= _MOST_WAITING or not self._is_awaited(queue[0][0])):
                yield from self._merged(*queue.popleft())

    def close(self) -> Iterator[tuple[PendingRow, Tensor]]:
        """End the exchange; yield the last rows. A rank with incomplete rows waits for parts, within a limit."""
        self._find_ranks(0.0)
        self._give_up()
        yield from self.exchange()
        if self._store is None:
            return
        with suppress(RuntimeError):
            self._store.set(f"closed/{self._rank}", "")
        end = time.monotonic() + LIMIT
        while any(self._waiting.values()) and time.monotonic() < end:
            time.sleep(_PAUSE)
            yield from self.exchange()
        self._store = None
        yield from self.exchange()

    def ask(self, name: str, stat: str, answer: Callable[[], Answer]) -> Answer:
        """Return the answer of the rank that merges the rows of a tensor. All ranks that share it must call this.

        It raises `RecordError` if another rank did not ask in time, or has the records of a session that is over.
        """
        ranks = self._ranks.get(name, ())
        if not ranks:
            return answer()
        self._find_ranks(LIMIT)
        leader = ranks[0]
        leads = leader == self._rank
        if self._store is None and leads:
            return answer()
        named = _dist.named(ranks)
        if self._store is None:
            why = f"{name} is shared by {named}, and rank {leader} keeps its records: ask there"
            raise RecordError(why)
        self._asked[leader] += 1
        key = f"asked/{leader}/{self._asked[leader]}/{name}/{stat}"
        result: Any = None
        try:
            if not leads:
                self._store.set(f"{key}/{self._rank}", "")
            wanted = ranks[1:] if leads else ranks[:1]
            here = _job_store.present(self._store, wanted, LIMIT, under=f"{key}/")
            if absent := [other for other in wanted if other not in here]:
                result = RecordError(
                    f"{name} is shared by {named}, and {_dist.named(absent)} did not ask for this record within {LIMIT:g} s: "
                    "all of these ranks must call `latest` and `history` of it while a session is on"
                )
            elif leads:
                result = _attempt(answer)
            else:
                result = pickle.loads(self._store.get(f"{key}/{leader}"))  # noqa: S301 # the ranks of a job trust each other
            if leads:
                self._store.set(f"{key}/{leader}", pickle.dumps(result))
        except RuntimeError as failure:
            raise RecordError(_FAILED.format(reason=reason_of(failure))) from None
        if isinstance(result, Exception):
            try:
                raise result
            finally:
                # The traceback of the error refers to this frame, and so to all that the caller holds.
                del result
        return cast("Answer", result)

    def _send(self, store: _job_store.OwnStore) -> None:
        for reader, parts in self._outgoing.items():
            sent = self._sent[reader]
            # A batch is gone once it was read.
            if not store.check([_batch(self._rank, reader, sent - _MOST_UNREAD)]):
                store.set(_batch(self._rank, reader, sent + 1), pickle.dumps(parts))
                self._sent[reader] += 1

    def _receive(self, store: _job_store.OwnStore) -> None:
        if not any(self._waiting.values()):
            return
        for sender in self._senders - self._closed:
            # Asked before the batches are read: a rank closes after it has sent its last batch.
            if store.check([f"closed/{sender}"]):
                self._closed.add(sender)
            batch = _batch(sender, self._rank, self._read[sender] + 1)
            while store.check([batch]):
                for series, number, part in pickle.loads(store.get(batch)):  # noqa: S301 # as above
                    self._parts[series, sender][number] = part
                store.delete_key(batch)
                self._read[sender] += 1
                batch = _batch(sender, self._rank, self._read[sender] + 1)

    def _led(self, row: PendingRow) -> list[Share]:
        return [share for share in row.shares if share.is_led_by(self._rank)]

    def _is_awaited(self, row: PendingRow) -> bool:
        """Tell whether a part of another rank is missing and may still come."""
        if self._store is None and self._search is None:
            return False
        for share in self._led(row):
            series = _series(row, share)
            for rank in share.ranks[1:]:
                newest = max(self._parts[series, rank], default=-1)
                if newest < row.number and rank not in self._closed:
                    return True
        return False

    def _merged(self, row: PendingRow, values: Tensor) -> Iterator[tuple[PendingRow, Tensor]]:
        """Yield the columns of a row that this rank holds whole, or can merge."""
        found: dict[int, float] = {}
        merge = measure.merge_of(row.key.stat)
        for share in self._led(row):
            parts = [values[list(share.places)].tolist()]
            series = _series(row, share)
            for rank in share.ranks[1:]:
                come = self._parts[series, rank]
                if row.number in come:
                    parts.append(come[row.number])
                self._parts[series, rank] = {n: p for n, p in come.items() if n > row.number}
            if len(parts) == max(1, len(share.ranks)):
                whole = merge(torch.tensor(parts, dtype=torch.float64, device="cpu"))
                found.update(zip(share.places, whole.tolist(), strict=True))
            elif self._store is not None:
                self._notify("shared rows", row.key.rule, _GIVEN_UP)
        if found:
            places = sorted(found)
            numbers = [found[place] for place in places]
            columns = [row.columns[place] for place in places]
            merged = torch.tensor(numbers, dtype=torch.float32, device="cpu")
            yield PendingRow(row.key, row.step, columns, replace=True), merged


def _attempt(answer: Callable[[], Answer]) -> Answer | Exception:
    try:
        return answer()
    except (KeyError, RecordError) as error:
        return error


def _batch(sender: int, reader: int, number: int) -> str:
    """Return the key of a batch of parts; the numbers of two ranks begin with 1."""
    return f"{reader}/{sender}/{number}"


def _series(row: PendingRow, share: Share) -> _Series:
    names = "\0".join(row.key.names[row.columns[place]] for place in share.places)
    checksum = zlib.crc32(names.encode("utf-8", "surrogatepass"))
    return row.key.rule, row.key.stat, row.key.point, checksum
