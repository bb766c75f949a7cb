"""Statistics of single tensors, measured as the tensors come, and collected into rows of many columns.

Each torch call costs microseconds, however few elements there are, and so does each row. A value must be
measured while the tensor exists, because later code may write into it; everything else can wait for the
values of other tensors. For a small tensor on the host even the measurement can wait: a copy takes
less time.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from gradsurgeon import _numbers, _torch
from gradsurgeon.actions import ObserverRule
from gradsurgeon.recording.shared_rows import Row
from gradsurgeon.statistics import columns_of
from gradsurgeon.store import Key
from gradsurgeon.tensors import measure
from gradsurgeon.tensors.measure import Kept

# The bound for a model that never runs its modules twice in the same order.
_MOST_ORDERS = 32
# One observation: the rule, the name, the step, the device, and the kept data.
_Seen = tuple[ObserverRule, str, int, torch.device, Kept]
# The places of one row: its keys, one per statistic, its columns, and the positions of their values.
_Places = tuple[Sequence[Key], tuple[int, ...], tuple[int, ...]]


class PendingStatistics:
    """The observations of rules on single tensors, until a caller takes them as rows."""

    def __init__(self) -> None:
        # Several threads append, and one thread takes.
        self._seen: deque[_Seen] = deque()
        self._layouts: dict[str, _Layout] = {}
        self._streams: defaultdict[torch.device, _torch.Stream] = defaultdict(_torch.Stream)

    def __len__(self) -> int:
        return len(self._seen)

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
        self._seen.append((rule, name, step, device, kept))

    def take(self) -> Iterator[tuple[Row, Tensor]]:
        """Yield rows of all observations, by rule and step. No other caller may take at the same time."""
        groups: dict[tuple[str, torch.device], list[_Seen]] = {}
        for _ in range(len(self._seen)):
            seen = self._seen.popleft()
            groups.setdefault((seen[0].id, seen[3]), []).append(seen)
        for (rule_id, device), group in groups.items():
            rule = group[0][0]
            layout = self._layouts.setdefault(rule_id, _Layout(rule))
            self._streams[device].follow(device)
            kept = [seen[4] for seen in group]
            values = measure.of_kept(rule.stats, kept)
            sources = () if device.type == "cpu" else kept
            steps: dict[int, list[int]] = {}
            for position, (_, _, step, _, _) in enumerate(group):
                steps.setdefault(step, []).append(position)
            for step, positions in steps.items():
                names = tuple([group[position][1] for position in positions])
                rows = layout.of(names)
                order = tuple([positions[place] for _, _, places in rows for place in places])
                lengths = [len(columns) for _, columns, _ in rows]
                pieces = torch.split(_picked(values, order), lengths, dim=1)
                for (keys, columns, _), piece in zip(rows, pieces, strict=True):
                    for key, numbers in zip(keys, piece, strict=True):
                        yield Row(key, step, columns, sources=sources), numbers


def _picked(values: Tensor, columns: tuple[int, ...]) -> Tensor:
    first, count = columns[0], len(columns)
    if columns == tuple(range(first, first + count)):  # nearly always: the device needs no index
        return values[:, first : first + count]
    return values[:, _torch.integers(columns, values.device)]


class _Layout:
    """The names that share the series of a rule: names that first came together, and equally often.

    A name stays in its series, so its values keep the order in which they came. A row of a series has no value for
    a name that did not come.
    """

    def __init__(self, rule: ObserverRule) -> None:
        self._rule, self._point = rule, rule.point
        # By name: the keys of its series, one key per statistic, and its column.
        self._columns: dict[str, tuple[Sequence[Key], int]] = {}
        self._known: dict[tuple[str, ...], list[_Places]] = {}

    def of(self, names: tuple[str, ...]) -> list[_Places]:
        # Nearly always the same modules run in each step, in the same order.
        if names not in self._known:
            if len(self._known) >= _MOST_ORDERS:
                self._known.clear()
            self._known[names] = self._places(names)
        return self._known[names]

    def _places(self, names: tuple[str, ...]) -> list[_Places]:
        # A module that runs a thousand times must not leave a thousand rows of the width of the model.
        by_calls: dict[int, list[str]] = {}
        for name, calls in Counter(names).items():
            if name not in self._columns:
                by_calls.setdefault(calls, []).append(name)
        for group in by_calls.values():
            rule, together = self._rule, tuple(group)
            stats = chain.from_iterable(map(columns_of, rule.stats))
            series = [Key(rule.id, stat, self._point, together) for stat in stats]
            self._columns.update((name, (series, column)) for column, name in enumerate(group))
        calls_so_far: Counter[str] = Counter()
        rows: dict[tuple[int, int], tuple[Sequence[Key], list[tuple[int, int]]]] = {}
        for position, name in enumerate(names):
            keys, column = self._columns[name]
            row = rows.setdefault((id(keys), calls_so_far[name]), (keys, []))
            row[1].append((column, position))
            calls_so_far[name] += 1
        found = []
        for keys, places in rows.values():
            columns, positions = zip(*sorted(places), strict=True)
            found.append((keys, columns, positions))
        return found
