"""Numbers on their way from devices to the host, many at a time, while training goes on."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from threading import RLock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gradsurgeon import _torch

Item = TypeVar("Item")


class DeviceQueue(Generic[Item]):
    """Accepts numbers on all devices and delivers them on the host, float32, in the order they came.

    The queue moves nothing during the capture of a CUDA graph: tensors on the device have no value then, and
    asking for an arrival would break the capture.
    """

    def __init__(self, take: Callable[[Sequence[tuple[Item, Tensor]]], None]) -> None:
        self._take = take
        self._waiting: dict[Hashable, tuple[Item, Tensor]] = {}
        self._under_way: deque[_Transfer[Item]] = deque()
        self._streams: defaultdict[torch.device, _torch.Stream] = defaultdict(_torch.Stream)
        # Several threads can call hooks, and readers live in other threads.
        self.lock = RLock()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: Item, values: Tensor, *, slot: Hashable = None) -> None:
        """Queue a copy of numbers; it replaces the numbers that wait in the same slot."""
        with self.lock:
            self._streams[values.device].follow(values.device)
            copied = values.detach().reshape(-1).to(torch.float32, copy=True)
            self._waiting[object() if slot is None else slot] = item, copied

    def send(self, *, wait: bool = False) -> None:
        """Send the waiting numbers to the host, and deliver the numbers that have arrived.

        Args:
            wait: wait for all numbers.
        """
        if _torch.is_capturing():
            return
        with self.lock:
            if self._waiting:
                for device in {values.device for _, values in self._waiting.values()}:
                    self._streams[device].follow(device)
                self._under_way.append(_Transfer(list(self._waiting.values())))
                self._waiting.clear()
            while self._under_way and (wait or self._under_way[0].arrived()):
                self._take(self._under_way.popleft().read())


class _Transfer(Generic[Item]):
    def __init__(self, rows: Sequence[tuple[Item, Tensor]]) -> None:
        self._rows = rows
        devices: dict[torch.device, list[Tensor]] = {}
        for _, values in rows:
            if not _torch.is_host(values):
                devices.setdefault(values.device, []).append(values)
        self._arrivals = {device: _torch.send(parts) for device, parts in devices.items()}

    def arrived(self) -> bool:
        return all(arrival.done() for arrival in self._arrivals.values())

    def read(self) -> list[tuple[Item, Tensor]]:
        """Return the numbers on the host. Waits for numbers that have not arrived."""
        landed = {device: iter(arrival.wait()) for device, arrival in self._arrivals.items()}
        return [
            (item, next(landed[values.device]) if values.device in landed else values)
            for item, values in self._rows
        ]
