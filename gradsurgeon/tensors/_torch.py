"""Typed wrappers around torch calls that are private, untyped or easy to misuse.

Only this module and `_backward_calls` use private names of torch.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Returns the id of the running backward pass, -1 outside of a pass. Hooks call it at every gradient,
# so no Python function wraps it.
graph_task: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
_cuda: Any = torch.cuda  # has no types
_HAS_CUDA = bool(_cuda._is_compiled())  # noqa: SLF001


def without_grad(function: _Function) -> _Function:
    """Return a function that runs under `torch.no_grad()`, in a third of the calls that its context takes."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # noqa: SLF001
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(enabled)  # noqa: SLF001

    return cast("_Function", run)


def keeps_graph() -> bool:
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # noqa: SLF001


def current_node() -> Any:
    return torch._C._current_autograd_node()  # noqa: SLF001


def next_node_number() -> int:
    """Return the number that the next node of a graph gets in this thread."""
    return int(torch._C._autograd._get_sequence_nr())  # noqa: SLF001


def forget_pass() -> None:
    """Remove what torch keeps for a running pass, and does not remove if the end of the pass raises."""
    # Otherwise the process aborts when the thread ends. Older releases keep nothing, and have no such function.
    remove = getattr(torch._C, "_remove_obj_from_tls", None)  # noqa: SLF001
    if remove is not None:
        remove("context")


def node_of(root: Node | Tensor) -> Node:
    if isinstance(root, Tensor):
        return get_gradient_edge(root).node
    return root


class Accumulation:
    """Distinguishes, inside a hook of a parameter, a `backward()` from a `torch.autograd.grad()`.

    `grad()` captures gradients before their accumulation nodes run, and torch raises if asked whether one will run.
    """

    def __init__(self) -> None:
        self._last = (-1, False)

    def runs(self, param: Tensor) -> bool:
        # Two threads may run passes: each thread uses the answer that it read itself.
        task = graph_task()
        last_task, runs = self._last
        if last_task != task:
            runs = True
            try:
                # The answer itself is useless: it is False for a leaf on which the script called `backward`.
                torch._C._will_engine_execute_node(get_gradient_edge(param).node)  # noqa: SLF001
            except RuntimeError:
                runs = False
            self._last = (task, runs)
        return runs


def is_capturing() -> bool:
    # Builds without CUDA have the function, but it raises.
    if not (_HAS_CUDA and _cuda.is_initialized()):
        return False
    try:
        return bool(_cuda.is_current_stream_capturing())
    except RuntimeError:  # a device that has failed refuses every call
        return False


def is_control_flow(error: Exception) -> bool:
    """Return whether torch raises an error to leave code early, not to report a failure."""
    # There is no public name, and the module may not be imported.
    return type(error).__name__ == "_StopRecomputationError"


def device_failure(error: Exception) -> str:
    """Return a sentence about an error that a device raised, as after a failed assert in a kernel; empty for other errors.

    Such a device refuses all further calls.
    """
    # The oldest releases raise a plain RuntimeError.
    if not isinstance(error, getattr(torch, "AcceleratorError", ())):
        return ""
    first = str(error).partition("\n")[0]
    return f"the device failed ({first}); CUDA_LAUNCH_BLOCKING=1 shows where"


def is_unreadable(tensor: Tensor) -> bool:
    """Return whether a tensor has no numbers to read now.

    It is on the meta device, in `torch.export`, `torch.func` or a batch, or its storage has been freed.
    """
    functorch = torch._C._functorch  # noqa: SLF001
    if tensor.is_meta or functorch.peek_interpreter_stack() is not None:
        return True
    # The module of its class may not be imported.
    is_fake = type(tensor).__name__ == "FakeTensor"
    return is_fake or functorch.is_legacy_batchedtensor(tensor) or is_freed(tensor)


def is_freed(tensor: Tensor) -> bool:
    """Return whether the storage of a tensor is gone: FSDP frees whole parameters between passes. A read ends the process."""
    if not torch._C._has_storage(tensor):  # noqa: SLF001 # a sparse tensor has none
        return False
    return tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor only wraps others, such as the result of a collective that is under way."""
    return type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor)


def lacks_operations(tensor: Tensor) -> bool:
    """Return whether torch has too few operations for a tensor: it is nested, masked, compressed or in float8."""
    if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
        return True
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return True
    return type(tensor).__name__ == "MaskedTensor"


def is_host(tensor: Tensor) -> bool:
    return tensor.is_cpu


class Stream:
    """Orders work on memory that several CUDA streams use: each stream waits for the previous one."""

    def __init__(self) -> None:
        self._last: Any = None

    def follow(self, device: torch.device) -> None:
        """Make the current stream of a device wait for the stream that was current at the last call."""
        if device.type != "cuda":
            return
        if self._last is not None:
            if torch._C._cuda_getCurrentRawStream(device.index) == self._last.cuda_stream:  # noqa: SLF001 # faster than its object
                return
            _cuda.current_stream(device).wait_stream(self._last)
        self._last = _cuda.current_stream(device)


class Arrival:
    def __init__(self, parts: Sequence[Tensor], host: Tensor, event: Any = None) -> None:
        # Kept until the copies are done: torch must not reuse the memory of another stream before it is read.
        self._parts = parts
        self._host = host
        self._event = event

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> Sequence[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return torch.split(self._host, list(map(len, self._parts)))


@lru_cache(maxsize=4096)
def integers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers, such as positions or lengths, on a device. The host does not wait for the copy."""
    # Code outside of inference mode uses the cached tensor also.
    with torch.inference_mode(mode=False):
        # A copy from pageable memory would wait.
        on_host = torch.tensor(numbers, device="cpu", pin_memory=device.type == "cuda")
        return on_host.to(device, non_blocking=True)


def send(parts: Sequence[Tensor]) -> Arrival:
    """Start to copy 1-dim tensors of one device to the host: asynchronously from CUDA, else at once."""
    with torch.no_grad():
        whole = torch.cat(list(parts))
    if whole.device.type != "cuda":
        return Arrival(parts, whole.cpu())
    # A copy to pageable memory would wait. Torch keeps the pinned memory for the next copy.
    host = torch.empty(len(whole), dtype=whole.dtype, device="cpu", pin_memory=True)
    host.copy_(whole, non_blocking=True)
    event = _cuda.Event()
    event.record(_cuda.current_stream(whole.device))
    return Arrival(parts, host, event)


def writes(tensor: Tensor) -> int:
    """Return how often a tensor was written to, 0 for an inference tensor, which does not count writes."""
    if tensor.is_inference():
        return 0
    return tensor._version  # noqa: SLF001 # no public name


def share_storage(grads: Sequence[Tensor]) -> list[bool]:
    """Return, for each gradient, whether another live tensor uses its storage; False for a sparse gradient."""
    # The tensor that a script passes as `backward(gradient=...)` can itself become ``.grad``.
    count_users = torch._C._storage_Use_Count  # noqa: SLF001
    # The tensor is one user. Its handle is another, in all releases only as long as it is held.
    # All handles are held at once, because one tensor can be the gradient of two parameters.
    handles = [grad.untyped_storage() if grad.layout is torch.strided else None for grad in grads]
    return [handle is not None and count_users(handle._cdata) > 2 for handle in handles]  # noqa: PLR2004, SLF001


def hooked_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer whose step torch shows to hooks: for a wrapper, the optimizer inside it, ``None`` if hidden.

    Some wrappers skip the constructor and have no table of hooks; others share the table of the wrapped optimizer.
    """
    table = vars(optimizer).get("_optimizer_step_pre_hooks")
    for inner in vars(optimizer).values():
        # `isinstance` would ask the object, and a proxy claims the class of the object that it wraps.
        if issubclass(type(inner), Optimizer) and inner is not optimizer:
            theirs = vars(inner).get("_optimizer_step_pre_hooks")
            if table is None or theirs is table:
                return hooked_optimizer(inner)
    if table is None:
        return None
    return optimizer


def register_first_step_post_hook(
    optimizer: Optimizer, hook: Callable[[Optimizer, Any, Any], None]
) -> RemovableHandle:
    handle = optimizer.register_step_post_hook(hook)
    table = cast("Any", optimizer)._optimizer_step_post_hooks  # noqa: SLF001 # no public word
    table.move_to_end(handle.id, last=False)
    return handle


@contextmanager
def without_hooks(params: Sequence[Tensor]) -> Iterator[None]:
    # The tables are emptied and refilled, not exchanged: a hook that is registered or removed meanwhile
    # must reach the table of the parameter.
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
            table.update({**before, **late})


def register_first(param: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    handle = register_hook(param, hook)
    table = cast("Any", param)._backward_hooks  # noqa: SLF001 # no public word
    # Torch reads the table at each call, so moving an entry to its front is enough.
    before = dict(table)
    table.clear()
    table[handle.id] = hook
    table.update(before)
    return handle


def preserving_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Hide writes that restore the content of tensors from graphs that saved these tensors."""
    preserve: Any = cast("Any", torch.autograd)._unsafe_preserve_version_counter  # noqa: SLF001 # no public word
    return cast("AbstractContextManager[None]", preserve(tuple(tensors)))


# A parameter keeps its hooks in these attributes.
_HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")


def is_hook_of(param: Tensor, handle: RemovableHandle) -> bool:
    """Return whether the hook of a handle is on ``param`` now: not removed, and not on a tensor that it replaced."""
    hooks = handle.hooks_dict_ref()
    if hooks is None or handle.id not in hooks:
        return False
    return any(getattr(param, table, None) is hooks for table in _HOOK_TABLES)


def reinstall_hooks(param: Tensor) -> None:
    """Reactivate the hooks of a parameter after its content was swapped with another tensor."""
    # A swap keeps the tables, but torch no longer calls them; assigning a table makes torch install it again.
    for table in _HOOK_TABLES:
        hooks = getattr(param, table, None)
        if hooks is not None:
            setattr(param, table, hooks)


def forget_empty_hooks(param: Tensor) -> None:
    """Drop the empty hook tables that removed hooks leave behind on ``param``."""
    for table in _HOOK_TABLES:
        hooks = getattr(param, table, None)
        if hooks is not None and not hooks:
            setattr(param, table, None)


def register_hook(param: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    return cast("RemovableHandle", cast("Any", param).register_hook(hook))


def register_post_accumulate_hook(param: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    return cast("RemovableHandle", cast("Any", param).register_post_accumulate_grad_hook(hook))


# Torch shows it in an error under ``fullgraph=True``.
_GRAPH_BREAK = (
    "gradsurgeon acts here, and its hooks cannot be part of a graph: compile without fullgraph=True; in a forward pass, "
    "you can instead use rules on parameters"
)


def uncompiled(function: _Function) -> _Function:
    """Mark a function that `torch.compile` must neither trace nor compile.

    `torch.compiler.disable` imports the compiler, which takes seconds.
    """
    # The compiler runs frames of this function unchanged, and all frames that they call.
    _skip_frames(function, "SKIP")
    # A tracer that reaches a call of this function stops there.
    cast("Any", function)._torchdynamo_disable = True  # noqa: SLF001
    cast("Any", function)._torchdynamo_disable_msg = _GRAPH_BREAK  # noqa: SLF001
    return function


def compile_within_caller(function: Callable[..., Any]) -> None:
    """Allow `torch.compile` to inline a function into its caller, but never to compile it alone."""
    _skip_frames(function, "DEFAULT")


def _skip_frames(function: Any, callees: str) -> None:
    eval_frame = torch._C._dynamo.eval_frame  # noqa: SLF001
    actions = eval_frame._FrameAction  # noqa: SLF001
    strategy = eval_frame._FrameExecStrategy(actions.SKIP, getattr(actions, callees))  # noqa: SLF001
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def forget_compiled_code() -> bool:
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    if convert_frame is None:
        return False
    eval_frame = torch._C._dynamo.eval_frame  # noqa: SLF001
    dropped = False
    with convert_frame.compile_lock:
        for reference in list(convert_frame.input_codes.seen):
            code = reference()
            if code is not None:
                dropped |= bool(eval_frame._debug_get_cache_entry_list(code))  # noqa: SLF001
                eval_frame.reset_code(code)
    return dropped
