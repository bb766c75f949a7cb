"""The calls of torch that are private, untyped or easily got wrong, wrapped once with types.

Nothing else in the package uses a private name of torch, but for `_backward_calls`. Each function says how the fact behind it
is known; the tests hold every one of them against the installed torch.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Returns the id of the running backward pass, -1 outside of one. As it is, without a function around
# it: hooks ask for it at every gradient.
graph_task: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001


def keeps_graph() -> bool:
    """Tell, inside a hook, whether another backward pass may go through the same graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # noqa: SLF001


def current_node() -> Any:
    """Return the node of the graph that this thread is running, ``None`` outside of a backward pass."""
    return torch._C._current_autograd_node()  # noqa: SLF001


def node_of(root: Node | Tensor) -> Node:
    """Return a node as it is, and of a leaf the one that accumulates its gradient."""
    return get_gradient_edge(root).node if isinstance(root, Tensor) else root


def accumulates(param: Tensor) -> bool:
    """Tell, inside a hook of ``param``, a `backward()` from a `torch.autograd.grad()`.

    The latter returns gradients and must not see edits. It captures them before the accumulation
    node would run, and torch refuses to say of such a node whether it will.
    """
    node = get_gradient_edge(param).node
    try:
        # The answer itself is no use: of a leaf that `backward` was called on it is False.
        torch._C._will_engine_execute_node(node)  # noqa: SLF001
    except RuntimeError:
        return False
    return True


class Accumulation:
    """Tells a `backward()` from a `torch.autograd.grad()`, as `accumulates`, and asks once per pass."""

    def __init__(self) -> None:
        self._last = (-1, False)

    def runs(self, param: Tensor) -> bool:
        # Of two threads each goes on with what it has asked itself.
        task, last = graph_task(), self._last
        if last[0] != task:
            self._last = last = (task, accumulates(param))
        return last[1]


def is_capturing() -> bool:
    """Tell whether the operations of this stream go into a CUDA graph instead of being run."""
    # Builds without CUDA have the question, but no answer.
    cuda: Any = torch.cuda  # has no types
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def is_unreadable(tensor: Tensor) -> bool:
    """Tell whether a tensor is on the meta device, of a trace of `torch.export`, or a batch of `vmap`."""
    if tensor.is_meta or (type(tensor) is not Tensor and _is_fake(tensor)):
        return True
    functorch = torch._C._functorch  # noqa: SLF001
    # Transforms inside one another wrap in layers.
    while functorch.is_functorch_wrapped_tensor(tensor) and not functorch.is_batchedtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def _is_fake(tensor: Tensor) -> bool:
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def in_transform() -> bool:
    """Tell whether a `torch.func` transform is running: see `aside`."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001


def aside(tensor: Tensor) -> AbstractContextManager[Tensor]:
    """Give the numbers of a tensor for work that is no part of a `torch.func` transform.

    Inside one, torch writes to nothing that was there before, and what is made there dies with it.
    """
    return _outside_transform(tensor) if in_transform() else nullcontext(tensor)


@contextmanager
def _outside_transform(tensor: Tensor) -> Iterator[Tensor]:
    functorch = torch._C._functorch  # noqa: SLF001
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    with torch._C._DisableFuncTorch():  # noqa: SLF001
        yield tensor


def is_host(tensor: Tensor) -> bool:
    """Tell whether reading a value of ``tensor`` waits for nothing."""
    return tensor.is_cpu


class Stream:
    """Orders work on memory that is used from several CUDA streams: each waits for the one before."""

    def __init__(self) -> None:
        self._last: Any = None

    def follow(self, device: torch.device) -> None:
        """Let the current stream of a device come after the one that was current last time."""
        if device.type != "cuda":
            return
        cuda: Any = torch.cuda  # has no types
        now = cuda.current_stream(device)
        if self._last is not None and now != self._last:
            now.wait_stream(self._last)
        self._last = now


class Arrival:
    """Copies of 1-dim tensors of one device, on their way to the host."""

    def __init__(self, parts: Sequence[Tensor], host: Tensor, event: Any = None) -> None:
        # Kept until then: memory of another stream must not be given to others before it has been read.
        self._parts = parts
        self._host = host
        self._event = event

    def done(self) -> bool:
        """Tell, without waiting, whether the copies can be read."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> Sequence[Tensor]:
        """Wait until the copies can be read, and return them."""
        if self._event is not None:
            self._event.synchronize()
        return torch.split(self._host, [len(part) for part in self._parts])


@lru_cache(maxsize=4096)
def integers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers, such as positions or lengths, on a device, brought there without waiting."""
    with torch.inference_mode(mode=False):  # it is used outside as well
        # A copy from pageable memory is one that waits.
        found = torch.tensor(numbers, device="cpu", pin_memory=device.type == "cuda")
        return found.to(device, non_blocking=True)


def send(parts: Sequence[Tensor]) -> Arrival:
    """Begin to copy 1-dim tensors of one device to the host: from CUDA without waiting, else at once."""
    with torch.no_grad():
        whole = torch.cat(list(parts))
    if whole.device.type != "cuda":
        return Arrival(parts, whole.cpu())
    cuda: Any = torch.cuda  # has no types
    # A copy to pageable memory is one that waits. Torch keeps pinned memory for the next copy.
    host = torch.empty(len(whole), dtype=whole.dtype, device="cpu", pin_memory=True)
    host.copy_(whole, non_blocking=True)
    event = cuda.Event()
    event.record(cuda.current_stream(whole.device))
    return Arrival(parts, host, event)


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one dtype and device; those of a lone one may stay where they are."""
    # Where none needs a view, `torch.cat` takes half the time; where some do, the views take twice as long.
    if set(map(Tensor.dim, tensors)) == {1}:
        return torch.cat(list(tensors))
    # DDP fills its buckets with it.
    return torch._C._nn.flatten_dense_tensors(list(tensors))  # noqa: SLF001


def writes(tensor: Tensor) -> int:
    """Return how often a tensor has been written to; what was made for inference counts none."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 # no public name


def share_storage(grads: Sequence[Tensor]) -> list[bool]:
    """Tell of each gradient that has a storage of its own whether another live tensor uses it, too."""
    # A tensor that the script gave as `backward(gradient=...)` can become ``.grad`` itself.
    strided = torch.strided
    return [grad.layout is strided and _users(grad.untyped_storage()) > 2 for grad in grads]  # noqa: PLR2004


def _users(storage: torch.UntypedStorage) -> int:
    # One user is the tensor, one the handle, which counts in all releases only as long as it is held.
    return torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001


def stepping(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer whose step torch shows to hooks: of a wrapper, the one inside it.

    Trainers wrap optimizers in objects that are torch optimizers by type. Some skip the constructor
    and so have no table of hooks, some share the table of what they wrap; the step that moves
    weights is that of the wrapped one either way. ``None`` where a wrapper hides it.
    """
    table = vars(optimizer).get("_optimizer_step_pre_hooks")
    for inner in vars(optimizer).values():
        # The type is asked, not the object: proxies claim to be what they stand for.
        if issubclass(type(inner), Optimizer) and inner is not optimizer:
            theirs = vars(inner).get("_optimizer_step_pre_hooks")
            if table is None or theirs is table:
                return stepping(inner)
    return None if table is None else optimizer


def hooks_on(param: Tensor) -> int:
    """Return how many hooks see the gradients that come to a parameter."""
    tensor: Any = param
    early, late = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # noqa: SLF001
    return (len(early) if early else 0) + (len(late) if late else 0)


def hooks_of(param: Tensor) -> list[object]:
    """Return the hooks that see the gradients that come to a parameter."""
    tensor: Any = param
    tables = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # noqa: SLF001
    return [hook for table in tables if table for hook in table.values()]


@contextmanager
def without_hooks(params: Sequence[Tensor]) -> Iterator[None]:
    """Let gradients come to parameters past all tensor hooks, which `torch.autograd.grad` would run and apply."""
    # The table itself is emptied and filled again: in the place of another one hooks that are registered or
    # removed meanwhile would be lost.
    kept = []
    for param in params:
        table = cast("Any", param)._backward_hooks  # noqa: SLF001 # no public word
        if table:
            kept.append((table, dict(table)))
            table.clear()
    try:
        yield
    finally:
        for table, before in kept:
            late = dict(table)
            table.clear()
            table.update(before)
            table.update(late)


def register_first(param: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Put a hook on a parameter that runs before all that are there."""
    handle = register_hook(param, hook)
    table = cast("Any", param)._backward_hooks  # noqa: SLF001 # no public word
    # Moving an entry to the front has no effect on what torch has of the table.
    others = {number: other for number, other in table.items() if number != handle.id}
    if others:
        table.clear()
        table[handle.id] = hook
        table.update(others)
    return handle


def preserving_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Let writes to tensors, which put back what is there, go unnoticed by graphs that have saved them."""
    if not tensors:
        return nullcontext()
    preserve: Any = cast("Any", torch.autograd)._unsafe_preserve_version_counter  # noqa: SLF001 # no public word
    return cast("AbstractContextManager[None]", preserve(tuple(tensors)))


def reinstall_hooks(param: Tensor) -> None:
    """Bring the hooks of a parameter back to life after its content was swapped with another tensor."""
    # The tables stay, but nothing calls them any more; assigning them makes torch install them anew.
    for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(param, table, None)) is not None:
            setattr(param, table, hooks)


def forget_empty_hooks(param: Tensor) -> None:
    """Drop the empty hook tables that removed hooks leave behind on ``param``."""
    for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(param, table, None) is not None and not getattr(param, table):
            setattr(param, table, None)


def register_hook(param: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    return cast("RemovableHandle", cast("Any", param).register_hook(hook))


def register_post_accumulate_hook(param: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    return cast("RemovableHandle", cast("Any", param).register_post_accumulate_grad_hook(hook))


def uncompiled(reason: object) -> Callable[[_Function], _Function]:
    """Return a decorator for functions that `torch.compile` must neither trace nor compile.

    What `torch.compiler.disable` does, without the seconds that it takes to import the compiler, which
    a script that compiles nothing must not pay for. Torch makes a text of ``reason`` when it needs one.
    """

    def mark(function: _Function) -> _Function:
        # Frames of this function are run as they are, and so are all that they call.
        _skip_frames(function, callees="SKIP")
        # Tracers that come upon a call of it stop here.
        cast("Any", function)._torchdynamo_disable = True  # noqa: SLF001
        cast("Any", function)._torchdynamo_disable_msg = reason  # noqa: SLF001
        return function

    return mark


def compile_within_caller(function: Callable[..., Any]) -> None:
    """Let a function be part of the graph of who calls it, but never become a graph of its own."""
    _skip_frames(function, callees="DEFAULT")


def _skip_frames(function: Any, *, callees: str) -> None:
    eval_frame = torch._C._dynamo.eval_frame  # noqa: SLF001
    actions = eval_frame._FrameAction  # noqa: SLF001
    strategy = eval_frame._FrameExecStrategy(actions.SKIP, getattr(actions, callees))  # noqa: SLF001
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def forget_compiled_code() -> bool:
    """Let `torch.compile` compile or reject everything anew; tell whether there was compiled code.

    Other than `torch.compiler.reset` this keeps everything that is not compiled code. The compiler is not
    imported for it.
    """
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    if convert_frame is None:
        return False
    eval_frame = torch._C._dynamo.eval_frame  # noqa: SLF001
    dropped = False
    with convert_frame.compile_lock:
        for reference in list(convert_frame.input_codes.seen):
            if (code := reference()) is not None:
                dropped |= bool(eval_frame._debug_get_cache_entry_list(code))  # noqa: SLF001
                eval_frame.reset_code(code)
    return dropped


class _Copied:
    """What copies and saved files get of a table of hooks: the entries that are not ours.

    It stands on the table itself as ``__reduce__``, so that the table remains the very one that handles
    of the script hold, of the type that torch and its compiler expect.
    """

    def __init__(self, table: OrderedDict[int, Any]) -> None:
        self._table = weakref.ref(table)
        self.ours: set[int] = set()

    def __call__(self) -> tuple[Any, ...]:
        table = self._table()
        items = () if table is None else table.items()
        theirs = [(number, entry) for number, entry in items if number not in self.ours]
        return type(table), (), None, None, iter(theirs)


def _tables(handle: RemovableHandle) -> list[OrderedDict[int, Any]]:
    tables = [reference() for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
    return [table for table in tables if table is not None]


def leave_behind(handle: RemovableHandle) -> None:
    """Keep a hook out of the copies of its module."""
    for table in _tables(handle):
        copied = vars(table).setdefault("__reduce__", _Copied(table))
        copied.ours.add(handle.id)


def take_off(handle: RemovableHandle) -> None:
    """Take a hook off its module, and with the last of ours what kept it out of copies."""
    tables = _tables(handle)
    handle.remove()
    for table in tables:
        copied = vars(table)["__reduce__"]
        copied.ours.discard(handle.id)
        if not copied.ours:
            del vars(table)["__reduce__"]
