"""What is known of a row while its numbers travel from the device to the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers
from gradsurgeon.store import Key


class Share(NamedTuple):
    """The places in a row whose tensors the same ranks share; no ranks if this rank holds the tensors whole."""

    ranks: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The rank that merges the parts."""
        return self.ranks[0] if self.ranks else _dist.rank()


def shares(tensors: Sequence[Tensor]) -> tuple[Share, ...]:
    if not tensors:
        return ()
    places_of: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        # The statistic of a tensor without elements is the same everywhere.
        places_of[_dist.sharing(tensor) if tensor.numel() else ()].append(place)
    return tuple(Share(ranks, tuple(places)) for ranks, places in places_of.items())


def by_column(
    keys: Sequence[Key], values: Tensor, *, are_parts: bool
) -> Iterator[tuple[Key, Tensor]]:
    """Yield each key of a statistic with its numbers.

    Several keys stand for the columns of ``values``. Numbers that ranks are going to merge keep a second dimension.
    """
    if len(keys) == 1:
        yield keys[0], values
        return
    for key, column in zip(keys, torch.split(values, 1, dim=1), strict=True):
        yield key, column if are_parts else column.squeeze(1)


class Row(NamedTuple):
    """A row on its way, without its numbers.

    Attributes:
        key: the key of the series.
        step: the step of the row.
        columns: the columns that have values, ascending.
        replace: whether the row takes the place of the last row of the same step.
        sources: kept alive until the numbers have arrived, because a device may not have read them yet.
        shares: the ranks that share the tensors of the columns, if the numbers are of parts of tensors.
        number: the number of the backward pass, alike on all ranks that share the tensors.
    """

    key: Key
    step: int
    columns: Sequence[int]
    replace: bool = False
    sources: Sequence[object] = ()
    shares: tuple[Share, ...] = ()
    number: int = 0

    def packed(self, values: Tensor) -> tuple[bytes, frozenset[int]]:
        """Return one float32 per name of the key as bytes, and the columns without a value."""
        width = len(self.key.names)
        if len(self.columns) == width:
            return _numbers.to_bytes(values), frozenset()
        # Scripts may set another default dtype or default device.
        whole = torch.zeros(width, dtype=torch.float32, device="cpu")
        whole[torch.tensor(self.columns, device="cpu")] = values
        return _numbers.to_bytes(whole), frozenset(range(width)) - frozenset(self.columns)
