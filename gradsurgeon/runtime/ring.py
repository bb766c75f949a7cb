"""Numbers that wait on their device, to be moved to the host many at a time.

One stretch of memory per device is used over and over. What is on an accelerator travels to the host
while training goes on, and is handed over when it has arrived; what is on the host is handed over as
it lies. A device that is steps behind is not waited for: more travels at once then, up to a bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gradsurgeon import _torch

Item = TypeVar("Item")

# Numbers a stretch has room for at least.
_LEAST = 4096
# Memory on the host for what travels; two transfers at once have it in any case: one arrives while the
# next one is on its way.
_MOST_BYTES = 64 * 2**20
_FEWEST_UNDER_WAY = 2


class _Stretch:
    """The memory of one device, and what there is on the host to receive it."""

    __slots__ = ("free", "landed", "memory", "stream", "used")

    def __init__(self, room: int, device: torch.device) -> None:
        self.stream = _torch.Stream()
        self.allot(room, device)

    def allot(self, room: int, device: torch.device) -> None:
        """Take memory for so many numbers; what the old one held is on its way."""
        # What is made in inference mode, where validation may come first, is no use outside.
        with torch.inference_mode(mode=False):
            self.memory = torch.empty(room, dtype=torch.float32, device=device)
        # Taking pinned memory from the system waits for the device: what has been read is used again.
        self.free: list[Tensor] = []
        self.landed = self.used = 0
        if not _torch.is_host(self.memory):
            self.free = [self._landing() for _ in range(_FEWEST_UNDER_WAY)]

    def _landing(self) -> Tensor:
        self.landed += 1
        with torch.inference_mode(mode=False):
            return _torch.landing(len(self.memory), self.memory.device)

    def fits_one_more(self) -> bool:
        """Tell whether there may be one more transfer than there has been at once."""
        size = len(self.memory) * self.memory.element_size()
        few = self.landed < _FEWEST_UNDER_WAY
        return bool(self.free) or few or (self.landed + 1) * size <= _MOST_BYTES

    def send(self) -> tuple[Tensor, _torch.Arrival]:
        """Begin to copy what is used to the host."""
        whole = self.free.pop() if self.free else self._landing()
        self.stream.follow(self.memory.device)
        arrival = _torch.send(self.memory[: self.used], whole[: self.used])
        self.used = 0
        return whole, arrival

    def take_back(self, host: Tensor) -> None:
        """Keep memory on the host, whose content has been read, for the next transfer."""
        if len(host) == len(self.memory) and host is not self.memory:
            self.free.append(host)


@dataclass(slots=True, eq=False)
class Slot(Generic[Item]):
    """The place of some numbers that wait, and what they are."""

    item: Item
    stretch: _Stretch
    start: int
    width: int
    size: int
    waits: bool = True

    def of(self, memory: Tensor) -> Tensor:
        """Return the numbers."""
        return memory[self.start : self.start + self.size]


@dataclass(slots=True)
class _Batch(Generic[Item]):
    slots: list[Slot[Item]]
    hosts: dict[int, Tensor] = field(default_factory=dict)
    arrivals: list[_torch.Arrival] = field(default_factory=list)

    def arrived(self) -> bool:
        return all(arrival.done() for arrival in self.arrivals)

    def wait(self) -> None:
        for arrival in self.arrivals:
            arrival.wait()


class Ring(Generic[Item]):
    """Takes numbers of all devices and hands them over on the host, in the order they came.

    Args:
        take: called with items and their numbers, which it may not keep.
        rows: how many rows of one width there is room for before they have to move.
    """

    def __init__(self, take: Callable[[Sequence[tuple[Item, Tensor]]], None], *, rows: int) -> None:
        self._take = take
        self._rows = rows
        self._stretches: dict[torch.device, _Stretch] = {}
        self._waiting: list[Slot[Item]] = []
        self._under_way: deque[_Batch[Item]] = deque()
        # Hooks can be called by several threads, and readers live in others.
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def under_way(self) -> bool:
        """Whether something has been sent and not been handed over."""
        return bool(self._under_way)

    def put(self, item: Item, values: Tensor, *, width: int | None = None) -> Slot[Item]:
        """Copy numbers to where they wait.

        Args:
            item: what they are.
            values: on any device; as many as `width` at most.
            width: how much room to keep, for `rewrite`.
        """
        size = values.numel()
        wide = size if width is None else width
        with self._lock:
            stretch = self._with_room(wide, values.device)
            slot = Slot(item, stretch, stretch.used, wide, size)
            stretch.used += wide
            self._waiting.append(slot)
            self._write(slot, values)
        return slot

    def rewrite(self, slot: Slot[Item], item: Item, values: Tensor) -> bool:
        """Put other numbers in the place of some that still wait; tell whether that was possible."""
        with self._lock:
            fits = values.device == slot.stretch.memory.device and values.numel() <= slot.width
            if not (slot.waits and fits):
                return False
            slot.item, slot.size = item, values.numel()
            self._write(slot, values)
        return True

    @staticmethod
    def _write(slot: Slot[Item], values: Tensor) -> None:
        slot.stretch.stream.follow(values.device)
        with torch.no_grad():
            slot.of(slot.stretch.memory).copy_(values.detach().reshape(-1))

    def _with_room(self, wide: int, device: torch.device) -> _Stretch:
        stretch = self._stretches.get(device)
        room = max(_LEAST, wide * self._rows)
        if stretch is None:
            stretch = self._stretches[device] = _Stretch(room, device)
        elif stretch.used + wide > len(stretch.memory):
            self.send()
            if room > len(stretch.memory):
                stretch.allot(room, device)
        return stretch

    def send(self) -> None:
        """Let what waits travel to the host, one transfer per device.

        Waits for the oldest transfer where those under way take all the memory that there may be.
        """
        with self._lock:
            self.collect()
            stretches = {id(slot.stretch): slot.stretch for slot in self._waiting}
            while self._under_way and not all(s.fits_one_more() for s in stretches.values()):
                self._arrive(self._under_way.popleft())
            slots, self._waiting = self._waiting, []
            if not slots:
                return
            batch = _Batch(slots)
            for number, stretch in stretches.items():
                if len(stretches) == 1 and _torch.is_host(stretch.memory):
                    # It is there already; what comes next may lie over it once it is handed over.
                    batch.hosts[number], stretch.used = stretch.memory, 0
                else:
                    batch.hosts[number], arrival = stretch.send()
                    batch.arrivals.append(arrival)
            for slot in slots:
                slot.waits = False
            self._under_way.append(batch)
            if not batch.arrivals:
                self.arrive()

    def collect(self) -> bool:
        """Hand over what has arrived, without waiting; tell whether there was anything."""
        with self._lock:
            found = False
            while self._under_way and self._under_way[0].arrived():
                self._arrive(self._under_way.popleft())
                found = True
            return found

    def settle(self) -> None:
        """Hand everything over. Waits for the device where something is there."""
        with self._lock:
            self.send()
            self.arrive()

    def arrive(self) -> None:
        """Hand over what has been sent. Waits for it where it has not arrived."""
        with self._lock:
            while self._under_way:
                self._arrive(self._under_way.popleft())

    def _arrive(self, batch: _Batch[Item]) -> None:
        batch.wait()
        self._take([(slot.item, slot.of(batch.hosts[id(slot.stretch)])) for slot in batch.slots])
        for stretch in {id(slot.stretch): slot.stretch for slot in batch.slots}.values():
            stretch.take_back(batch.hosts[id(stretch)])
