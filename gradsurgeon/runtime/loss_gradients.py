"""The gradients of single losses, taken from the graph of one forward pass before the pass that trains.

Each loss takes a backward pass of its own, which gives no parameter a gradient, fires no hook on a parameter and
leaves no record; it must not leave anything else behind either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from gradsurgeon import _dist, _torch
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime.retained_gradients import put_back

_COMPILED = (
    "the gradients of single losses cannot be taken from a model that torch.compile has compiled to free what it saved as "
    "soon as it is used: set torch._functorch.config.donated_buffer = False before the model is first called"
)


class _Thread(threading.local):
    # The numbers of the passes that it has begun to take gradients, as long as it does.
    tasks: list[int] | None = None


_thread = _Thread()
# The running passes that only take gradients. Autograd calls hooks in the threads of its devices.
_tasks: set[int] = set()


@contextmanager
def begun() -> Iterator[Callable[[int], None] | None]:
    """Give what is to be told the number of a pass that this thread begins, ``None`` if it trains."""
    tasks = _thread.tasks
    if tasks is None:
        yield None
        return
    before = len(tasks)

    # Called in the thread of a device, as the pass begins there.
    def take(task: int) -> None:
        tasks.append(task)
        _tasks.add(task)

    try:
        yield take
    finally:
        _tasks.difference_update(tasks[before:])


def is_taken() -> bool:
    """Tell, inside of a backward pass, whether it only takes the gradients of one loss.

    What is seen of it is seen again by the pass that trains.
    """
    return bool(_tasks) and _torch.graph_task() in _tasks


def gradients(
    losses: Mapping[str, Tensor],
    params: Sequence[Tensor],
    modules: Iterable[nn.Module],
    wrappers: Sequence[object] = (),
) -> tuple[dict[str, list[Tensor | None]], Sequence[int]]:
    """Return the gradient of each loss with respect to each parameter, ``None`` where it does not reach it.

    And the numbers that autograd has given the passes.

    Args:
        losses: scalars, of a graph that is kept.
        params: leaves that require gradients.
        modules: those whose buffers a forward pass that is run again may move (checkpointing).
        wrappers: the `DistributedDataParallel` of the models.

    Raises:
        GradSurgeonError: the graph cannot be gone through twice, or a gradient is sparse.
    """
    rows: dict[str, list[Tensor | None]] = {}
    tasks: list[int] = []
    with ExitStack() as stack:
        stack.enter_context(_dist.extra_pass(wrappers))
        buffers = _Buffers(modules)
        _thread.tasks = tasks
        stack.callback(setattr, _thread, "tasks", None)
        for name, loss in losses.items():
            with _torch.without_hooks(params), buffers.put_back(), put_back(loss):
                rows[name] = _of(name, loss, params)
    return rows, tasks


def _of(name: str, loss: Tensor, params: Sequence[Tensor]) -> list[Tensor | None]:
    if not loss.requires_grad:
        return [None] * len(params)
    try:
        row: list[Tensor | None] = list(
            torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        )
    except RuntimeError as error:
        if "donated buffer" in str(error):
            raise GradSurgeonError(_COMPILED) from error
        # Releases of torch word it differently.
        if "use_reentrant=False" in str(error) and ".grad()" in str(error):
            raise GradSurgeonError(_REENTRANT.format(name=printable(name))) from error
        raise
    for grad in row:
        if grad is not None and grad.layout != torch.strided:
            raise GradSurgeonError(
                f"the loss {printable(name)} has a sparse gradient, which cannot be combined: leave the parameter out by "
                "`exclude`, or make its layer with sparse=False"
            )
    return row


_REENTRANT = (
    "the gradients of the loss {name} cannot be taken by themselves: they go through a checkpoint with "
    "use_reentrant=True; use use_reentrant=False"
)


class _Buffers:
    """The buffers of some modules, which a forward pass that is run again may move."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tables = [module._buffers for module in dict.fromkeys(modules)]  # noqa: SLF001 # where they are
        self._slots = [
            (table, name, buffer)
            for table in tables
            for name, buffer in table.items()
            if buffer is not None and _is_writable(buffer)
        ]
        self._contents = [buffer.detach().clone() for _, _, buffer in self._slots]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        buffers = [buffer for _, _, buffer in self._slots]
        with _torch.preserving_versions(buffers):
            try:
                yield
            finally:
                # Whether one was written to cannot be asked: batch norm writes without counting it.
                with torch.no_grad():
                    for (table, name, buffer), content in zip(
                        self._slots, self._contents, strict=True
                    ):
                        table[name] = buffer
                        buffer.copy_(content)


def _is_writable(buffer: Tensor) -> bool:
    # An expanded one has several elements in one place, and nothing writes to such.
    plain = not (_dist.is_sharded(buffer) or buffer.is_inference() or buffer.is_sparse)
    return plain and all(
        stride or size == 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
    )
