"""Copies of tensors that rules keep, the newest ones within a limit, and numbers of them for the run directory."""

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.actions import Rule
from gradsurgeon.errors import printable
from gradsurgeon.records.event_log import EventLog
from gradsurgeon.records.store.layout import clean, json_text
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

    @property
    def rules(self) -> list[str]:
        """The ids of the rules that have kept something."""
        return list(self._kept)

    def keep(self, rule: Rule, name: str, step: int, tensor: Tensor) -> None:
        """Keep a copy: the script or the next layer may later write into the tensor."""
        last, call = self._calls.get((rule.id, name), (-1, -1))
        call = call + 1 if last == step else 0
        self._calls[rule.id, name] = (step, call)
        kept = self._kept.setdefault(rule.id, {})
        kept[name, step, call] = copied = tensor.detach().clone()
        limit: int = getattr(rule, "max_bytes", 0)
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
    def described(self) -> bytes:
        """Return numbers of the copies for the run directory. Waits for the device."""
        found = [_of_rule(rule, self.tensors_of(rule)) for rule in self.rules]
        return json_text(found).encode()


def _size(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return _size(tensor._values()) + _size(tensor._indices())  # noqa: SLF001 # uncoalesced
    return tensor.numel() * tensor.element_size()


def _of_rule(rule: str, kept: Kept) -> dict[str, Any]:
    newest = {name: (name, step, call) for name, step, call in kept}
    shown = []
    for key in islice(newest.values(), _TENSORS):
        name, step, call = key
        tensor = kept[key]
        entry = {
            "name": clean(name),
            "step": step,
            "call": call,
            "dtype": str(tensor.dtype),
        }
        try:
            entry |= _numbers(tensor)
        except Exception as error:  # noqa: BLE001 # any kind of tensor may come, and the others are shown
            reason = str(error).partition("\n")[0][:_LONGEST_REASON] or type(error).__name__
            entry["note"] = f"cannot be shown: {printable(reason)}"
        shown.append({field: value for field, value in entry.items() if value is not None})
    return {"rule": rule, "more": len(newest) - len(shown), "tensors": shown}


def _numbers(tensor: Tensor) -> dict[str, Any]:
    """Return shape, range and mean of the finite elements, and the number of non-finite elements."""
    if _dist.is_sharded(tensor):
        raise TypeError("it is divided over ranks (a DTensor), of which each has only a part")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError("it is sparse or quantized")
    numbers = _doubles(tensor.flatten()[:_MOST])
    finite = numbers[numbers.isfinite()]
    notes = ["complex: of the magnitudes"] if tensor.is_complex() else []
    notes += [f"of the first {_MOST:,} elements"] if tensor.numel() > _MOST else []
    found: dict[str, Any] = {
        "shape": list(map(int, tensor.shape)),
        "elements": tensor.numel(),
        "nonfinite": len(numbers) - len(finite),
        "note": "; ".join(notes),
    }
    if not len(finite):
        return found
    low = finite.min().item()
    high = finite.max().item()
    mean = finite.mean().item()
    # The sum of numbers near the end of the range of float64 overflows.
    found["mean"] = mean if math.isfinite(mean) else None
    return {**found, "low": low, "high": high}


def _doubles(tensor: Tensor) -> Tensor:
    here = tensor.cpu()  # other devices may lack float64
    return here.to(torch.complex128).abs() if here.is_complex() else here.double()
