"""Finds parts of a model that differ from most models and may be meant: one module under several names, tensors that are no parameters."""

import gc
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon.actions.checks.base import Check, Finding, Findings, Pass, owned_ids, param_ids
from gradsurgeon.common import _live

# The passes at which tensors are noted, and looked for in the graph.
_FIRST = 10
_SECOND = 30
# A small tensor may be a constant such as the mean of the data.
_LEAST = 16
_ROWS = 256
_DISTINCT = 0.9
_ALIKE = 0.5

_REPEATED = (
    "{{names}} are one object: a list of {number} that repeats one module trains it once. If the parts should learn apart, make "
    "each by a call of its own, as in `[Block() for _ in range({number})]`"
)
_NO_COPY = (
    "{{names}} are one object, so `{copy}` changes with each update. If it should lag behind or stay, make it by "
    "`copy.deepcopy`"
)
_PLAIN = (
    "{names} are plain tensors of a module: the loss depends on them, but no optimizer trains them, and neither `state_dict` nor "
    "`model.to` sees them. Wrap each in `nn.Parameter` to train it, or call `register_buffer`"
)
# Words in the names of networks that copy another one.
_COPIES = frozenset({"target", "teacher", "ema", "momentum", "old", "ref", "reference", "shadow"})


def _shared_modules(root: nn.Module) -> Findings:
    """Yield modules with parameters that have several places in one list, and copies that are the original."""
    for path, parent in root.named_modules():
        # The names of each child, repeated ones included.
        names = defaultdict(list)
        for name, child in parent._modules.items():  # noqa: SLF001 # no public name has repeated children
            if child is not None and param_ids(child):
                names[child].append(f"{path}.{name}".removeprefix("."))
        is_list = isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for alike in names.values():
            if len(alike) > 1 and is_list:
                text = _REPEATED.format(number=len(alike))
                yield Finding("repeated", text, names=tuple(alike), is_fact=True)
            yield from _no_copy(alike)
    for holder in gc.get_referrers(root):
        variables = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        yield from _no_copy([name for name, value in [*variables.items()] if value is root])


def _no_copy(names: Sequence[Any]) -> Findings:
    names = list(map(str, names))
    copies = []
    for name in names:
        words = re.split(r"[._]", name.lower())
        if not _COPIES.isdisjoint(words):
            copies.append(name)
    if 0 < len(copies) < len(names):
        text = _NO_COPY.format(copy=copies[0])
        yield Finding("no copy", text, names=tuple(names), is_fact=True)


class StructureFacts(Check):
    """Looks at the modules before the first pass, and later for tensors that a loss depends on and that nobody trains."""

    def __init__(self) -> None:
        self._passes = 0
        # A tensor that is new in each pass is a result of the module.
        self._noted: list[Tensor] = []

    @property
    def is_over(self) -> bool:
        return self._passes >= _SECOND

    def before_pass(self, starting: Pass) -> Findings:
        self._passes += 1
        root = starting.model.root()
        if root is None or starting.graph is None:
            return
        if self._passes == 1:
            yield from _shared_modules(root)
        elif self._passes == _FIRST:
            self._noted = [tensor for _, tensor in _tables(root)]
        elif self._passes == _SECOND and self._noted:
            noted = set(map(id, self._noted))
            used = starting.graph.addresses()
            names = []
            for name, tensor in _tables(root):
                if id(tensor) in noted and tensor.data_ptr() in used and _may_train(tensor):
                    names.append(name)
            self._noted = []
            if names:
                yield Finding("plain", _PLAIN, names=tuple(names), is_fact=True)


def _tables(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the larger tensors that are attributes of modules, by name."""
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            is_plain = type(value) is Tensor and value.layout == torch.strided and value.is_leaf
            if is_plain and value.is_floating_point() and value.numel() >= _LEAST:
                yield f"{path}.{name}".removeprefix("."), value


def _may_train(tensor: Tensor) -> bool:
    """Tell whether a tensor seems meant to train. Waits for the device.

    Either it requires a gradient and no optimizer has it, or its numbers look random, unlike positions and masks.
    """
    if tensor.requires_grad:
        for optimizer in _live.instances(Optimizer):
            if id(tensor) in owned_ids(optimizer):
                return False
        return True
    rows = tensor.reshape(len(tensor), -1)[:_ROWS].float()
    centred = rows - rows.mean(0)
    correlation_of_rows = (centred[1:] * centred[:-1]).sum() / centred.square().sum()
    distinct_numbers = set(rows.flatten().tolist())
    if len(distinct_numbers) <= _DISTINCT * rows.numel():
        return False
    return bool(correlation_of_rows.abs() < _ALIKE)
