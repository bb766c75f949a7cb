"""Numbers on their way from devices to the host, many at a time, while training goes on."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from threading import RLock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gradsurgeon.actions import ObserverRule
from gradsurgeon.records.shared_rows import PendingRow
from gradsurgeon.records.store import Key
from gradsurgeon.tensors import _numbers, _torch, measure
from gradsurgeon.tensors.measure import Kept
from gradsurgeon.tensors.statistics import columns_of

Item = TypeVar("Item")
# The bound for a model that never runs its modules twice in the same order.
_MOST_ORDERS = 32
# One observation: the rule, the name, the step, the device, and the kept data.
_Observed = tuple[ObserverRule, str, int, torch.device, Kept]
# The places of one row: its keys, one per statistic, its columns, and the positions of their values.
_Places = tuple[Sequence[Key], tuple[int, ...], tuple[int, ...]]


class DeviceQueue(Generic[Item]):
    """Accepts numbers on all devices and delivers them on the host, float32, in the order they came."""

    def __init__(self, deliver: Callable[[Sequence[tuple[Item, Tensor]]], None]) -> None:
        self._deliver = deliver
        self._waiting: dict[Hashable, tuple[Item, Tensor]] = {}
        self._under_way: deque[_Transfer[Item]] = deque()
        self._streams: defaultdict[torch.device, _torch.Stream] = defaultdict(_torch.Stream)
        # Several threads can call hooks, and readers live in other threads.
        self.lock = RLock()

    def put(
        self, item: Item, values: Tensor, *, slot: Hashable = None, is_copy: bool = False
    ) -> int:
        """Queue a copy of numbers; it replaces the numbers that wait in the same slot. Return how many items wait.

        Numbers that are a copy themselves, float32, are queued as they are.
        """
        with self.lock:
            if not values.is_cpu:
                self._streams[values.device].follow(values.device)
            copied = values.reshape(-1)
            if not is_copy:
                copied = copied.detach().to(torch.float32, copy=True)
            if slot is None:
                slot = object()
            self._waiting[slot] = (item, copied)
            return len(self._waiting)

    def send(self, *, wait: bool = False) -> None:
        """Send the waiting numbers to the host, and deliver the numbers that have arrived; with ``wait`` all numbers."""
        if _torch.is_capturing():
            return
        with self.lock:
            if self._waiting:
                for device in {values.device for _, values in self._waiting.values()}:
                    self._streams[device].follow(device)
                self._under_way.append(_Transfer(list(self._waiting.values())))
                self._waiting.clear()
            while self._under_way and (wait or self._under_way[0].arrived()):
                self._deliver(self._under_way.popleft().read())

    def drop(self) -> None:
        """Forget the numbers that devices hold, because a device has failed; deliver those of the host."""
        with self.lock:
            rows: list[tuple[Item, Tensor]] = []
            for transfer in self._under_way:
                rows += transfer.rows
            rows += self._waiting.values()
            self._under_way.clear()
            self._waiting.clear()
            self._deliver([(item, values) for item, values in rows if _torch.is_host(values)])


class _Transfer(Generic[Item]):
    def __init__(self, rows: Sequence[tuple[Item, Tensor]]) -> None:
        self.rows = rows
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
        rows = []
        for item, values in self.rows:
            if values.device in landed:
                rows.append((item, next(landed[values.device])))
            else:
                rows.append((item, values))
        return rows


class PendingStatistics:
    """The observations of rules on single tensors, until a caller takes them as rows."""

    def __init__(self) -> None:
        # Several threads append, and one thread takes.
        self._observed: deque[_Observed] = deque()
        self._layouts: dict[str, _Layout] = {}
        self._streams: defaultdict[torch.device, _torch.Stream] = defaultdict(_torch.Stream)

    def __len__(self) -> int:
        return len(self._observed)

    def add(self, rule: ObserverRule, name: str, step: int, tensor: Tensor) -> None:
        """Observe a detached tensor; later writes into the tensor do not change the observation."""
        device = tensor.device
        kept: Kept
        if _numbers.is_small(tensor):
            kept = tensor.clone()
        else:
            if not tensor.is_cpu:
                self._streams[device].follow(device)
            kept = measure.numbers(rule.stats, tensor)
        self._observed.append((rule, name, step, device, kept))

    def drop(self) -> None:
        """Forget the observations of devices, because a device has failed."""
        self._observed = deque(observed for observed in self._observed if observed[3].type == "cpu")

    def take_rows(self) -> Iterator[tuple[PendingRow, Tensor]]:
        """Yield rows of all observations, by rule and step. No other caller may take at the same time."""
        groups: dict[tuple[str, torch.device], list[_Observed]] = {}
        for _ in range(len(self._observed)):
            observed = self._observed.popleft()
            rule, _, _, device, _ = observed
            groups.setdefault((rule.id, device), []).append(observed)
        for group in groups.values():
            yield from self._rows_of(group)

    def _rows_of(self, group: Sequence[_Observed]) -> Iterator[tuple[PendingRow, Tensor]]:
        """Yield rows of the observations of one rule on one device, by step."""
        rules, all_names, steps, devices, kept = zip(*group, strict=True)
        rule = rules[0]
        device = devices[0]
        if rule.id not in self._layouts:
            self._layouts[rule.id] = _Layout(rule)
        layout = self._layouts[rule.id]
        self._streams[device].follow(device)
        values = measure.of_kept(rule.stats, kept)
        sources: Sequence[Kept] = ()
        if device.type != "cpu":
            sources = kept
        by_step: dict[int, list[int]] = {}
        for position, step in enumerate(steps):
            by_step.setdefault(step, []).append(position)
        for step, positions in by_step.items():
            names = tuple([all_names[position] for position in positions])
            for keys, columns, places in layout.places_of(names):
                picked = _picked(values, [positions[place] for place in places])
                for key, numbers in zip(keys, picked, strict=True):
                    yield PendingRow(key, step, columns, sources=sources), numbers


def _picked(values: Tensor, columns: list[int]) -> Tensor:
    first = columns[0]
    end = first + len(columns)
    if columns == list(range(first, end)):  # nearly always: the device needs no index
        return values[:, first:end]
    return values[:, _torch.integers(tuple(columns), values.device)]


class _Layout:
    """The names that share the series of a rule: names that first came together, and equally often."""

    def __init__(self, rule: ObserverRule) -> None:
        self._rule = rule
        self._stats: list[str] = []
        for stat in rule.stats:
            self._stats += columns_of(stat)
        # Maps each name to the keys of its series, one key per statistic, and its column.
        self._columns: dict[str, tuple[Sequence[Key], int]] = {}
        # Nearly always the same modules run in each step, in the same order.
        self.places_of = lru_cache(_MOST_ORDERS)(self._places)

    def _places(self, names: tuple[str, ...]) -> list[_Places]:
        # A module that runs a thousand times must not leave a thousand rows of the width of the model.
        by_calls: dict[int, list[str]] = {}
        for name, calls in Counter(names).items():
            if name not in self._columns:
                by_calls.setdefault(calls, []).append(name)
        rule = self._rule
        for group in by_calls.values():
            series = [Key(rule.id, stat, rule.point, tuple(group)) for stat in self._stats]
            for column, name in enumerate(group):
                self._columns[name] = (series, column)
        calls_so_far: Counter[str] = Counter()
        rows: dict[tuple[int, int], tuple[Sequence[Key], list[tuple[int, int]]]] = {}
        for position, name in enumerate(names):
            keys, column = self._columns[name]
            _, cells = rows.setdefault((id(keys), calls_so_far[name]), (keys, []))
            cells.append((column, position))
            calls_so_far[name] += 1
        places = []
        for keys, cells in rows.values():
            columns, positions = zip(*sorted(cells), strict=True)
            places.append((keys, columns, positions))
        return places
