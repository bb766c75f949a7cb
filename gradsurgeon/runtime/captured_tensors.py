"""Tensors that `capture` rules keep, bounded by bytes."""

from __future__ import annotations

from torch import Tensor

from gradsurgeon.actions import Rule
from gradsurgeon.runtime.event_log import EventLog

CaptureKey = tuple[str, int, int]


class CapturedTensors:
    """Per rule, copies of tensors by name, step and call; the oldest make room for new ones."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._kept: dict[str, dict[CaptureKey, Tensor]] = {}
        self._bytes: dict[str, int] = {}
        self._calls: dict[tuple[str, str], tuple[int, int]] = {}

    def keep(self, rule: Rule, name: str, step: int, tensor: Tensor) -> None:
        """Keep a copy: the script, or the next layer, may go on to write into the tensor."""
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
            text = f"the copies exceed {limit:,} bytes: the oldest make room (`max_bytes`)"
            self._event_log.once("captures", text, rule=rule.id, step=step)
        self._event_log.fired(rule.id, step)

    def of(self, rule: str) -> dict[CaptureKey, Tensor]:
        """Return what a rule has kept, oldest first."""
        return dict(self._kept.get(rule, {}))


def _size(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return _size(tensor._values()) + _size(tensor._indices())  # noqa: SLF001 # as they are
    return tensor.numel() * tensor.element_size()
