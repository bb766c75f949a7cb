"""Copies of tensors that rules keep, the newest ones within a limit."""

from collections import Counter, defaultdict

from torch import Tensor

from gradsurgeon.actions import CaptureRule
from gradsurgeon.records.event_log import EventLog

CaptureKey = tuple[str, int, int]


class CapturedTensors:
    """Copies of tensors per rule, by name, step and call; new copies replace the oldest."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._kept = defaultdict[str, dict[CaptureKey, Tensor]](dict)
        self._bytes = Counter[str]()
        self._calls: dict[tuple[str, str], tuple[int, int]] = {}

    def keep(self, rule: CaptureRule, name: str, step: int, tensor: Tensor) -> None:
        """Keep a copy: the script or the next layer may later write into the tensor."""
        last_step, calls = self._calls.get((rule.id, name), (step, 0))
        if last_step != step:
            calls = 0
        self._calls[rule.id, name] = (step, calls + 1)
        copied = tensor.detach().clone()
        kept = self._kept[rule.id]
        kept[name, step, calls] = copied
        self._bytes[rule.id] += _size(copied)
        while self._bytes[rule.id] > rule.max_bytes and kept:
            oldest = next(iter(kept))
            self._bytes[rule.id] -= _size(kept.pop(oldest))
            text = f"the copies exceed {rule.max_bytes:,} bytes: new copies replace the oldest (`max_bytes`)"
            self._event_log.notice_once("captures", text, rule=rule.id, step=step)
        self._event_log.count_fired(rule.id, step)

    def tensors_of(self, rule: str) -> dict[CaptureKey, Tensor]:
        return dict(self._kept[rule])


def _size(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return _size(tensor._values()) + _size(tensor._indices())  # noqa: SLF001 # uncoalesced
    return tensor.numel() * tensor.element_size()
