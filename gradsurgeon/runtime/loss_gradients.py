"""The gradients of single losses, taken from the graph of one forward pass before the training pass.

Each loss gets a backward pass of its own. Such a pass writes to no ``.grad`` of a parameter and fires no hook on a
parameter. It adds to no `retain_grad()`, changes no buffer and leaves no record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gradsurgeon import _dist, _torch
from gradsurgeon._patching import Patch
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime import current_pass
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.tensors.backward_graph import BackwardGraph, roots_of

_COMPILED = (
    "the gradients of single losses cannot be taken: torch.compile compiled the model to free each saved tensor right "
    "after its use. Set torch._functorch.config.donated_buffer = False before the first call of the model"
)
_REENTRANT = (
    "the gradients of the loss {name} cannot be taken alone: its graph has a checkpoint with use_reentrant=True; use "
    "use_reentrant=False"
)
_SPARSE = (
    "the loss {name} has a sparse gradient, and sparse gradients cannot be combined: `exclude` the parameter, or build "
    "its layer with sparse=False"
)


def gradients(
    losses: Mapping[str, Tensor],
    params: Sequence[Tensor],
    modules: Iterable[nn.Module],
    wrappers: Sequence[object] = (),
) -> tuple[dict[int, dict[str, Tensor]], Sequence[int]]:
    """Return the gradients by the ids of the parameters and then by loss, and the numbers of the passes.

    Args:
        losses: scalars; the passes retain their graph.
        params: leaves that require gradients.
        modules: the modules whose buffers may change, because checkpointing runs their forward pass again.
        wrappers: the `DistributedDataParallel` wrappers of the models.

    Raises:
        GradSurgeonError: the graph cannot be run twice, or a gradient is sparse.
    """
    found: dict[int, dict[str, Tensor]] = {}
    buffers = _Buffers(modules)
    with _dist.extra_pass(wrappers), current_pass.taking() as tasks:
        for name, loss in losses.items():
            with _torch.without_hooks(params), buffers.put_back(), _retained_put_back(loss):
                for param, grad in _gradients_of(name, loss, params):
                    found.setdefault(id(param), {})[name] = grad
    return found, tasks


def _gradients_of(
    name: str, loss: Tensor, params: Sequence[Tensor]
) -> Sequence[tuple[Tensor, Tensor]]:
    if not loss.requires_grad:
        return []
    try:
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            loss, params, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if "donated buffer" in str(error):
            raise GradSurgeonError(_COMPILED) from error
        # The wording differs between releases of torch.
        if "use_reentrant=False" in str(error) and ".grad()" in str(error):
            raise GradSurgeonError(_REENTRANT.format(name=printable(name))) from error
        raise
    pairs = zip(params, grads, strict=True)
    reached = [(param, grad) for param, grad in pairs if grad is not None]
    if any(grad.layout != torch.strided for _, grad in reached):
        raise GradSurgeonError(_SPARSE.format(name=printable(name)))
    return reached


class _Buffers:
    """Copies of the buffers of some modules, which a repeated forward pass may change."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tables = [module._buffers for module in dict.fromkeys(modules)]  # noqa: SLF001 # where they are
        self._kept = [
            (table, name, buffer, buffer.detach().clone())
            for table in tables
            for name, buffer in table.items()
            if buffer is not None and _is_writable(buffer)
        ]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        with _torch.preserving_versions([buffer for _, _, buffer, _ in self._kept]):
            try:
                yield
            finally:
                # All buffers are restored: batch norm writes without counting, so versions do not show which changed.
                with torch.no_grad():
                    for table, name, buffer, content in self._kept:
                        table[name] = buffer
                        buffer.copy_(content)


def _is_writable(buffer: Tensor) -> bool:
    # Several elements of an expanded buffer share one place, so no operation can write to it.
    plain = not (_dist.is_sharded(buffer) or buffer.is_inference() or buffer.is_sparse)
    sizes = zip(buffer.stride(), buffer.shape, strict=True)
    return plain and all(stride or size == 1 for stride, size in sizes)


# Activations on which the script called `retain_grad()`. Autograd keeps no list of them, so the calls are noted.
_retained: Any = WeakTensorKeyDictionary()
_noting: list[ExitStack] = []


def note_retained(*, wanted: bool) -> None:
    """Start or stop noting calls of `retain_grad()`: only sessions with rules on losses need the notes."""
    if wanted and not _noting:
        stack = ExitStack()
        # On exit, the patch is undone first: no call may be noted after the notes are cleared.
        stack.callback(_retained.clear)
        stack.callback(Patch(torch.Tensor, "retain_grad", _note).undo)
        _noting.append(stack)
    elif _noting and not wanted:
        _noting.pop().close()


# Uncompiled, because compiled code would call the function on a stand-in for the tensor.
@uncompiled
def _note(original: Callable[..., None], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    original(tensor, *args, **kwargs)
    _retained[tensor] = None


@contextmanager
def _retained_put_back(loss: Tensor) -> Iterator[None]:
    """Restore the retained gradients of activations of one graph after a pass through the graph."""
    # The list is a copy: another thread may note a tensor meanwhile.
    alive = [tensor for ref in _retained.keyrefs() if (tensor := ref()) is not None]
    # Other threads may run passes through the graphs of other tensors.
    nodes = set(BackwardGraph(roots_of([loss])).nodes()) if alive else ()
    kept = [(one, one.grad) for one in alive if one.retains_grad and one.grad_fn in nodes]
    try:
        yield
    finally:
        for tensor, grad in kept:
            tensor.grad = grad
