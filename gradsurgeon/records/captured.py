"""Copies of tensors that rules keep, the newest ones within a limit, and numbers of them for the run directory."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.actions import CaptureRule
from gradsurgeon.errors import reason_of
from gradsurgeon.records.event_log import EventLog
from gradsurgeon.records.store.layout import clean
from gradsurgeon.tensors import _dist

CaptureKey = tuple[str, int, int]
Kept = Mapping[CaptureKey, Tensor]
_TENSORS = 16
# Tensors may have gigabytes: so many elements at most become float64.
_MOST = 2**24
_LONGEST_REASON = 200


class CapturedTensors:
    """Copies of tensors per rule, by name, step and call; new copies replace the oldest."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._kept: dict[str, dict[CaptureKey, Tensor]] = {}
        self._bytes: dict[str, int] = {}
        self._calls: dict[tuple[str, str], tuple[int, int]] = {}

    def keep(self, rule: CaptureRule, name: str, step: int, tensor: Tensor) -> None:
        """Keep a copy: the script or the next layer may later write into the tensor."""
        last_step, last_call = self._calls.get((rule.id, name), (-1, -1))
        call = 0
        if last_step == step:
            call = last_call + 1
        self._calls[rule.id, name] = (step, call)
        copied = tensor.detach().clone()
        kept = self._kept.setdefault(rule.id, {})
        kept[name, step, call] = copied
        limit = rule.max_bytes
        self._bytes[rule.id] = self._bytes.get(rule.id, 0) + _size(copied)
        while self._bytes[rule.id] > limit and kept:
            oldest = next(iter(kept))
            self._bytes[rule.id] -= _size(kept.pop(oldest))
            text = f"the copies exceed {limit:,} bytes: new copies replace the oldest (`max_bytes`)"
            self._event_log.notice_once("captures", text, rule=rule.id, step=step)
        self._event_log.count_fired(rule.id, step)

    def tensors_of(self, rule: str) -> dict[CaptureKey, Tensor]:
        return dict(self._kept.get(rule, {}))

    @torch.no_grad()
    def described(self) -> list[dict[str, Any]]:
        """Return numbers of the copies for the run directory, by rule. Waits for the device."""
        return [_of_rule(rule, kept) for rule, kept in self._kept.items()]


def _size(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return _size(tensor._values()) + _size(tensor._indices())  # noqa: SLF001 # uncoalesced
    return tensor.numel() * tensor.element_size()


def _of_rule(rule: str, kept: Kept) -> dict[str, Any]:
    newest = {key[0]: key for key in kept}
    shown = []
    for key in islice(newest.values(), _TENSORS):
        name, step, call = key
        tensor = kept[key]
        entry = {"name": clean(name), "step": step, "call": call, "dtype": str(tensor.dtype)}
        try:
            entry |= _numbers(tensor)
        except Exception as error:  # noqa: BLE001 # any kind of tensor may come, and the others are shown
            entry["note"] = f"cannot be shown: {reason_of(error)[:_LONGEST_REASON]}"
        shown.append(entry)
    return {"rule": rule, "more": len(newest) - len(shown), "tensors": shown}


def _numbers(tensor: Tensor) -> dict[str, Any]:
    """Return shape, range and mean of the finite elements, and the number of non-finite elements."""
    if _dist.is_sharded(tensor):
        raise TypeError("it is divided over ranks (a DTensor), of which each has only a part")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError("it is sparse or quantized")
    notes = []
    numbers = tensor.flatten()[:_MOST].cpu()  # other devices may lack float64
    if tensor.numel() > _MOST:
        notes.append(f"of the first {_MOST:,} elements")
    if numbers.is_complex():
        notes.append("complex: of the magnitudes")
        numbers = numbers.to(torch.complex128).abs()
    numbers = numbers.double()
    finite = numbers[numbers.isfinite()]
    entry: dict[str, Any] = {
        "shape": [int(length) for length in tensor.shape],
        "nonfinite": len(numbers) - len(finite),
        "note": "; ".join(notes),
    }
    if len(finite):
        entry["low"] = finite.min().item()
        entry["high"] = finite.max().item()
        # Divided first: the sum of numbers near the end of the range of float64 overflows.
        entry["mean"] = (finite / len(finite)).sum().item()
    return entry
