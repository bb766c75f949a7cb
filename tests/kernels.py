"""Other kernels than those of this machine: every result of a training is off by up to an ulp, at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# Operations that add up many numbers, or approximate a function: kernels round these in ways of their own.
_ROUNDED = (
    "mm", "bmm", "addmm", "convolution", "convolution_backward", "sum", "mean", "exp", "log", "tanh", "sigmoid", "gelu",
    "gelu_backward", "native_layer_norm", "native_layer_norm_backward", "native_batch_norm", "native_batch_norm_backward",
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "embedding_dense_backward",
    "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
)  # fmt: skip
_ULPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


class OtherKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add rounding to the results of operations, while it is entered."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "overloadpacket", func).__name__
        return tree_map(self._rounded, result) if name in _ROUNDED else result

    def _rounded(self, result: Any) -> Any:
        if not isinstance(result, Tensor) or result.dtype not in _ULPS:
            return result
        ulp = _ULPS[result.dtype]
        factors = 1 + ulp * (2 * torch.rand(result.shape, generator=self.generator).double() - 1)
        rounded = (result.double() * factors).to(result.dtype)
        return torch.where(result.isfinite(), rounded, result)
