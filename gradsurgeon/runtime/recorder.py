"""Rows on their way from the device to the store."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon import _torch
from gradsurgeon.store import Key, Records

# Rows wait on the device so that one transfer serves many; this many of them are a few hundred kB
# for a large model.
_ROWS_PER_FLUSH = 64


class Recorder:
    """Collects rows of measurements and moves them to the host in one transfer per flush."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._waiting: list[tuple[Key, int, Tensor, frozenset[int], bool]] = []

    def add(
        self, key: Key, step: int, found: Sequence[int], values: Tensor, *, replace: bool
    ) -> None:
        """Take one row.

        Args:
            key: the series.
            step: the clock of its tensors.
            found: the columns that have a value, ascending.
            values: float32, shape ``[len(found)]``, on any device.
            replace: the row takes the place of an earlier one of the same step.
        """
        width = len(key.names)
        absent: frozenset[int] = frozenset()
        if len(found) != width:
            absent = frozenset(range(width)) - frozenset(found)
            whole = values.new_zeros(width)
            whole[torch.tensor(found, device=values.device)] = values
            values = whole
        row = (key, step, values.detach(), absent, replace)
        last = self._waiting[-1] if self._waiting else None
        if replace and last is not None and (last[0] is key and last[1] == step):
            self._waiting[-1] = row
            return
        self._waiting.append(row)
        if len(self._waiting) >= _ROWS_PER_FLUSH:
            self.flush()

    def flush(self) -> None:
        """Move what waits to the store: one transfer per device."""
        waiting, self._waiting = self._waiting, []
        devices = {row[2].device for row in waiting}
        hosts: dict[torch.device, Tensor] = {}
        for device in devices:
            rows = [row[2] for row in waiting if row[2].device == device]
            hosts[device] = torch.cat(rows).cpu()
        offsets = dict.fromkeys(devices, 0)
        for key, step, values, absent, replace in waiting:
            start = offsets[values.device]
            offsets[values.device] = stop = start + values.numel()
            part = _torch.to_bytes(hosts[values.device][start:stop])
            self.records.add(key, step, part, absent, replace=replace)
