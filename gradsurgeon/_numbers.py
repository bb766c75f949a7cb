"""Numbers taken of gradients of any layout and dtype: norms, statistics, counts.

They work on plain tensors, strided or sparse; those of sharded gradients are put together elsewhere.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def on_values(edit: Callable[[Tensor], Tensor], grad: Tensor) -> Tensor:
    """Apply ``edit`` to a gradient of any layout, out of place.

    A sparse gradient is coalesced first: its duplicates are addends, and a bound on addends is no
    bound on their sum.
    """
    if grad.layout == torch.strided:
        return edit(grad)
    whole = grad.coalesce()
    return torch.sparse_coo_tensor(
        whole.indices(),
        edit(whole.values()),
        whole.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def values(grad: Tensor) -> Tensor:
    """Return the elements of a gradient of any layout; those a sparse one leaves out are zero."""
    grad = grad.detach()
    return grad if grad.layout == torch.strided else grad.coalesce().values()


def _norm_dtype(dtype: torch.dtype) -> torch.dtype | None:
    # float16 overflows at 65504, so a norm of it must not be taken in float16.
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


def norms(grads: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Return the norm of each gradient. Shape ``[len(grads)]``, float32, on their device.

    The tensors share a device. A norm is non-finite where an element is, and also where the sum of
    squares overflows: see `nonfinite`. An empty gradient has norm 0.
    """
    groups: dict[torch.dtype, list[int]] = {}
    dense = [values(grad) for grad in grads]
    for index, grad in enumerate(dense):
        groups.setdefault(grad.dtype, []).append(index)
    parts: list[Tensor] = []
    places: list[int] = []
    for dtype, members in groups.items():
        # One call over the list, as `clip_grad_norm_` does it; it has no public name.
        found = torch._foreach_norm(  # noqa: SLF001
            [_nonempty(dense[index]) for index in members], order, dtype=_norm_dtype(dtype)
        )
        parts.append(torch.stack(found).to(torch.float32))
        places += members
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    if places == list(range(len(dense))):
        return joined
    inverse = torch.tensor(places, device=joined.device).argsort()
    return joined[inverse]


def _nonempty(grad: Tensor) -> Tensor:
    # The maximum norm of nothing is an error to torch.
    return grad if grad.numel() else grad.new_zeros(1)


def nonfinite(grad: Tensor) -> Tensor:
    """Return the number of NaN and infinite elements, as a 0-dim tensor on the device."""
    return values(grad).isfinite().logical_not_().sum()


def first_nonfinite(grad: Tensor) -> tuple[str, int]:
    """Return ``NaN`` or ``Inf`` and the number of such elements. Waits for the device."""
    elements = values(grad)
    if nans := int(elements.isnan().sum()):
        return "NaN", nans
    return "Inf", int(elements.isinf().sum())


def statistic(stat: str, grad: Tensor) -> Tensor:
    """Return one statistic of a gradient as a 0-dim float32 tensor on its device.

    Mean, extremes and zeros count the elements that a sparse gradient leaves out. An empty gradient
    has norm 0, and NaN for what needs an element.
    """
    elements = values(grad)
    missing = grad.numel() - elements.numel()
    if elements.dtype in (torch.float16, torch.bfloat16):
        elements = elements.float()
    return _STATISTICS[stat](elements, missing).to(torch.float32)


def _none(elements: Tensor) -> Tensor:
    return torch.full((), math.nan, device=elements.device)


def _mean(elements: Tensor, missing: int) -> Tensor:
    return elements.sum() / (elements.numel() + missing) if elements.numel() else _none(elements)


def _std(elements: Tensor, missing: int) -> Tensor:
    if not elements.numel():
        return _none(elements)
    count = elements.numel() + missing
    mean = elements.sum() / count
    # Two passes: the difference of the mean square and the squared mean cancels.
    spread = (elements - mean).abs().square().sum() + missing * mean.abs().square()
    return (spread / count).sqrt()


def _extreme(
    pick: Callable[[Tensor], Tensor], limit: Callable[..., Tensor]
) -> Callable[[Tensor, int], Tensor]:
    def extreme(elements: Tensor, missing: int) -> Tensor:
        if not elements.numel():
            return _none(elements)
        found = pick(elements)
        return limit(found, torch.zeros_like(found)) if missing else found

    return extreme


_STATISTICS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "l1": lambda elements, _: elements.abs().sum(),
    "l2": lambda elements, _: torch.linalg.vector_norm(elements),
    # `vector_norm(inf)` and `amax` raise on empty tensors.
    "linf": lambda elements, _: (
        elements.abs().amax() if elements.numel() else torch.zeros((), device=elements.device)
    ),
    "mean": _mean,
    "std": _std,
    "min": _extreme(torch.amin, torch.minimum),
    "max": _extreme(torch.amax, torch.maximum),
    "zeros": lambda elements, missing: (elements == 0).sum() + missing,
    "nonfinite": lambda elements, _: elements.isfinite().logical_not_().sum(),
}


def to_bytes(tensor: Tensor) -> bytes:
    """Return a contiguous float32 CPU tensor as bytes, without numpy, which torch does not need."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
