"""Numbers on their way from devices to the host, many at a time, while training goes on."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from threading import RLock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gradsurgeon.actions import ObserverRule
from gradsurgeon.records.shared_rows import MeasuredRow, PendingRow
from gradsurgeon.records.store import Key
from gradsurgeon.tensors import _torch, measure
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
        self._under_way = deque[_Transfer[Item]]()
        self._streams = defaultdict[torch.device, _torch.Stream](_torch.Stream)
        # Several threads can call hooks, and readers live in other threads.
        self.lock = RLock()

    def put(
        self, item: Item, values: Tensor, *, slot: Hashable = None, is_copy: bool = False
    ) -> int:
        """Queue a copy of numbers; it replaces the numbers that wait in the same slot. Return how many items wait.

        Numbers that are a copy themselves, float32, are queued as they are.
        """
        with self.lock:
            self._streams[values.device].follow(values.device)
            copied = values.reshape(-1)
            if not is_copy:
                copied = copied.detach().to(torch.float32, copy=True)
            self._waiting[object() if slot is None else slot] = (item, copied)
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
            sent = chain.from_iterable([transfer.rows for transfer in self._under_way])
            rows = [*sent, *self._waiting.values()]
            self._under_way.clear()
            self._waiting.clear()
            self._deliver([(item, values) for item, values in rows if _torch.is_host(values)])


class _Transfer(Generic[Item]):
    def __init__(self, rows: Sequence[tuple[Item, Tensor]]) -> None:
        self.rows = rows
        by_device = defaultdict(list)
        for _, values in rows:
            by_device[values.device].append(values)
        self._arrivals = {device: _torch.send(parts) for device, parts in by_device.items()}

    def arrived(self) -> bool:
        return all(arrival.done() for arrival in self._arrivals.values())

    def read(self) -> list[tuple[Item, Tensor]]:
        """Return the numbers on the host. Waits for numbers that have not arrived."""
        landed = {device: iter(arrival.wait()) for device, arrival in self._arrivals.items()}
        return [(item, next(landed[values.device])) for item, values in self.rows]


class PendingStatistics:
    """The observations of rules on single tensors, until a caller takes them as rows."""

    def __init__(self) -> None:
        # Several threads append, and one thread takes.
        self._observed = deque[_Observed]()
        self._layouts: dict[str, _Layout] = {}
        self._streams = defaultdict[torch.device, _torch.Stream](_torch.Stream)

    def __len__(self) -> int:
        return len(self._observed)

    def add(self, rule: ObserverRule, name: str, step: int, tensor: Tensor) -> None:
        """Observe a detached tensor; later writes into the tensor do not change the observation."""
        device = tensor.device
        kept: Kept
        if measure.is_kept(rule.stats, tensor):
            kept = tensor.clone()
        else:
            self._streams[device].follow(device)
            kept = measure.numbers(rule.stats, tensor)
        self._observed.append((rule, name, step, device, kept))

    def drop(self) -> None:
        """Forget the observations of devices, because a device has failed."""
        self._observed = deque(observed for observed in self._observed if observed[3].type == "cpu")

    def take_rows(self) -> Iterator[MeasuredRow]:
        """Yield rows of all observations, by rule and step. No other caller may take at the same time."""
        groups = defaultdict(list)
        for _ in range(len(self._observed)):
            observed = self._observed.popleft()
            groups[observed[0].id, observed[3]].append(observed)
        for group in groups.values():
            yield from self._rows_of(group)

    def _rows_of(self, group: Sequence[_Observed]) -> Iterator[MeasuredRow]:
        """Yield rows of the observations of one rule on one device, by step."""
        rule, _, _, device, _ = group[0]
        if rule.id not in self._layouts:
            self._layouts[rule.id] = _Layout(rule)
        layout = self._layouts[rule.id]
        self._streams[device].follow(device)
        kept = [observed[-1] for observed in group]
        values = measure.of_kept(rule.stats, kept)
        by_step = defaultdict(list)
        for position, (_, name, step, _, _) in enumerate(group):
            by_step[step].append((position, name))
        for step, measured in by_step.items():
            positions, names = zip(*measured, strict=True)
            for keys, columns, places in layout.places_of(names):
                picked = tuple([positions[place] for place in places])
                numbers_of = values[:, _torch.integers(picked, values.device)]
                for key, numbers in zip(keys, numbers_of, strict=True):
                    yield PendingRow(key, step, columns, sources=kept), numbers


class _Layout:
    """The names that share the series of a rule: names that first came together, and equally often."""

    def __init__(self, rule: ObserverRule) -> None:
        self._rule = rule
        # Maps each name to the keys of its series, one key per statistic, and its column.
        self._columns: dict[str, tuple[tuple[Key, ...], int]] = {}
        # Nearly always the same modules run in each step, in the same order.
        self.places_of = lru_cache(_MOST_ORDERS)(self._places)

    def _places(self, names: tuple[str, ...]) -> Sequence[_Places]:
        # A module that runs a thousand times must not leave a thousand rows of the width of the model.
        by_calls = defaultdict(list)
        for name, calls in Counter(names).items():
            if name not in self._columns:
                by_calls[calls].append(name)
        rule = self._rule
        for group in by_calls.values():
            stats: list[str] = []
            for stat in rule.stats:
                stats += columns_of(stat)
            keys = tuple([Key(rule.id, stat, rule.point, tuple(group)) for stat in stats])
            for column, name in enumerate(group):
                self._columns[name] = (keys, column)
        calls_so_far = Counter[str]()
        cells = defaultdict(list)
        for position, name in enumerate(names):
            keys, column = self._columns[name]
            cells[keys, calls_so_far[name]].append((column, position))
            calls_so_far[name] += 1
        places = []
        for (keys, _), of_row in cells.items():
            columns, positions = zip(*sorted(of_row), strict=True)
            places.append((keys, columns, positions))
        return places
