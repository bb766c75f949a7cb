"""Copies of tensors that rules keep, the newest ones within a limit."""

from __future__ import annotations

from torch import Tensor

from gradsurgeon.actions import Rule
from gradsurgeon.recording.event_log import EventLog
from gradsurgeon.recording.previews import CaptureKey, previews
from gradsurgeon.store.layout import json_text


class CapturedTensors:
    """Copies of tensors per rule, by name, step and call; new copies replace the oldest."""

    def __init__(self, event_log: EventLog) -> None:
        # The rules that have kept a tensor.
        self.rules: dict[str, Rule] = {}
        self._event_log = event_log
        self._kept: dict[str, dict[CaptureKey, Tensor]] = {}
        self._bytes: dict[str, int] = {}
        self._calls: dict[tuple[str, str], tuple[int, int]] = {}

    def keep(self, rule: Rule, name: str, step: int, tensor: Tensor) -> None:
        """Keep a copy: the script or the next layer may later write into the tensor."""
        last, call = self._calls.get((rule.id, name), (-1, -1))
        call = call + 1 if last == step else 0
        self._calls[rule.id, name] = (step, call)
        self.rules[rule.id] = rule
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

    def of(self, rule: str) -> dict[CaptureKey, Tensor]:
        return dict(self._kept.get(rule, {}))

    def previews(self) -> bytes:
        """Return small pictures of the copies for the run directory. Waits for the device."""
        return json_text(previews(self.rules, self.of)).encode()


def _size(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return _size(tensor._values()) + _size(tensor._indices())  # noqa: SLF001 # uncoalesced
    return tensor.numel() * tensor.element_size()
