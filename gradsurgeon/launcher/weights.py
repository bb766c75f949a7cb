"""Tells whether somebody has updated a model, be it by means that torch takes no notice of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradsurgeon import _dist, _torch

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Imprint = dict[str, int]


def imprint(model: nn.Module) -> Imprint:
    """Return a number for each parameter that changes with any bit of it. Waits for the device."""
    if _torch.is_capturing():
        return {}  # Nothing can be read while a CUDA graph is recorded.
    with torch.no_grad():
        return {name: _number(_dist.local(param)) for name, param in model.named_parameters()}


def differ(before: Imprint, after: Imprint) -> bool:
    """Tell whether a parameter that both know has changed."""
    return any(after.get(name, number) != number for name, number in before.items())


def _number(param: Tensor) -> int:
    if param.is_complex():
        param = torch.view_as_real(param)
    kind = _WHOLE.get(param.element_size())
    if param.is_meta or param.layout is not torch.strided or kind is None:
        # Writing by way of `.data` is not seen then.
        return param._version  # noqa: SLF001 # the documented way to see in-place writes
    return int(param.view(kind).sum(dtype=torch.int64))
