"""One backward pass of several named losses, with rules on the gradient of each."""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.weak import WeakTensorKeyDictionary

from gradsurgeon.common._patching import Patch
from gradsurgeon.distributed import data_parallel
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime.loss_effects import DueLossRule
from gradsurgeon.runtime.loss_rules import LossRules, NamedPass, current
from gradsurgeon.runtime.running_passes import alone, taking
from gradsurgeon.tensors import _dist, _torch
from gradsurgeon.tensors._torch import uncompiled
from gradsurgeon.tensors.backward_graph import BackwardGraph, roots_of
from gradsurgeon.tensors.inner_products import Contributions

# The sum of the losses that no rule names. No loss has this name: names of losses are not empty.
REST = ""
_NAMES = 'pass the losses by name: gradsurgeon.backward({"seg": seg_loss, "depth": depth_loss})'
_SPARSE = "the loss {name} has a sparse gradient, which cannot be combined: `exclude` the parameter, or use sparse=False"
_TWO = "rule {rule}: the rule {other} of another session combines {name} already: `exclude` it from one of them"


def before_plain_pass(
    sessions: Collection[LossRules], graph: BackwardGraph, inputs: Sequence[Tensor]
) -> None:
    """Meet the other ranks before a pass without named losses, if ranks average it: all must pass none."""
    if sessions and current.get() is None:
        leaves = list(inputs or graph.leaves())
        for rules in sessions:
            rules.due(leaves, None)


def backward(
    losses: Mapping[str, Tensor],
    scaler: GradScaler | None,
    sessions: Collection[LossRules],
    modules: Iterable[nn.Module],
) -> None:
    """Run the backward pass of the sum of losses; rules of the sessions act on the gradient of each loss."""
    _check(losses)
    scaled = losses if scaler is None else {n: scaler.scale(loss) for n, loss in losses.items()}
    # Summed as a script would do it, so without a rule exactly the operations of a plain script run.
    total = reduce(operator.add, scaled.values())
    graph = BackwardGraph(roots_of([total]))
    with ExitStack() as stack:
        due: list[DueLossRule] = []
        if sessions:
            leaves = list(graph.leaves())
            due += [one for rules in sessions for one in rules.due(leaves, losses)]
        if due:
            stack.enter_context(alone(graph))
        named = NamedPass(due)
        if parts := _parts(due, scaled):
            grads, tasks = _gradients(due, parts, total, list(modules))
            with torch.no_grad():
                named.take(grads, _weights(due, grads, tasks))
        stack.enter_context(named.delivering())
        torch.autograd.backward(total)


def _check(losses: object) -> None:
    if not isinstance(losses, Mapping) or not all(isinstance(one, str) and one for one in losses):
        raise TypeError(_NAMES)
    if not losses:
        raise ValueError("no loss was passed: gradsurgeon.backward needs at least one")
    for name, loss in losses.items():
        called = f"the loss {printable(name)}"
        if not isinstance(loss, Tensor):
            raise TypeError(f"{called} is not a tensor, but of type {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(
                f"{called} has the shape {tuple(loss.shape)}, but a loss must be one number: reduce it, e.g. by `.mean()`"
            )


def _parts(due: Sequence[DueLossRule], losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the losses that need a pass of their own, alike on all ranks: they may meet in a pass (`SyncBatchNorm`)."""
    names = dict.fromkeys(name for one in due for name in one.senders)
    parts = {name: losses[name] for name in names if name in losses}
    others = [losses[name] for name in sorted(losses) if name not in names]
    return {**parts, REST: reduce(operator.add, others)} if parts and others else parts


def _weights(
    due: Sequence[DueLossRule], grads: Mapping[int, Mapping[str, Tensor]], tasks: Sequence[int]
) -> dict[int, Mapping[str, float]]:
    """Run the rules on the gradients; return the weights other than 1, by the ids of the parameters to combine."""
    sessions = {one.context for one in due}
    given = {one: Contributions(grads, one.scaling.of(tasks)) for one in sessions}
    found: dict[int, tuple[str, Mapping[str, float]]] = {}
    for one in due:
        if not (weights := one.effect.run(one, given[one.context])):
            continue
        for number, param in one.params.items():
            if id(param) in found:
                # Binding refuses two such rules of one session.
                other, _ = found[id(param)]
                raise GradSurgeonError(
                    _TWO.format(rule=one.rule.id, name=one.name(number), other=other)
                )
            if id(param) in grads:
                found[id(param)] = one.rule.id, weights
    return {key: weights for key, (_, weights) in found.items()}


def _gradients(
    due: Sequence[DueLossRule],
    parts: Mapping[str, Tensor],
    total: Tensor,
    modules: Sequence[nn.Module],
) -> tuple[dict[int, dict[str, Tensor]], Sequence[int]]:
    """Return the gradients by the ids of the parameters and then by loss, and the numbers of the passes.

    ``modules`` may change their buffers, because checkpointing runs their forward pass again.
    """
    found: dict[int, dict[str, Tensor]] = {}
    if any(one.groups for one in due) and any(isinstance(m, nn.SyncBatchNorm) for m in modules):
        # Ranks meet in the backward pass of these layers, but a loss may bypass a layer on some rank. Adding zero times
        # the sum makes each pass visit all layers that the pass of the sum visits.
        parts = {name: loss + total * 0.0 for name, loss in parts.items()}
    params = list({id(param): param for one in due for param in one.params.values()}.values())
    wrappers = [w for one in due for w in one.context.ranks.wrappers_of([*one.params])]
    put_back = _buffers_of(modules)
    with data_parallel.extra_pass(wrappers), taking() as tasks:
        for name, loss in parts.items():
            with _torch.without_hooks(params), put_back(), _retained_put_back(loss):
                for param, grad in _gradients_of(name, loss, params):
                    found.setdefault(id(param), {})[name] = grad
    return found, tasks


def _gradients_of(
    name: str, loss: Tensor, params: Sequence[Tensor]
) -> Sequence[tuple[Tensor, Tensor]]:
    if not loss.requires_grad:
        return []
    grads: Sequence[Tensor | None] = torch.autograd.grad(
        loss, params, retain_graph=True, allow_unused=True
    )
    pairs = zip(params, grads, strict=True)
    reached = [(param, grad) for param, grad in pairs if grad is not None]
    if any(grad.layout != torch.strided for _, grad in reached):
        raise GradSurgeonError(_SPARSE.format(name=printable(name)))
    return reached


def _buffers_of(modules: Iterable[nn.Module]) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes contexts, each of which restores the buffers of modules at its end."""
    tables = [module._buffers for module in dict.fromkeys(modules)]  # noqa: SLF001 # where they are
    kept = [
        (table, name, buffer, buffer.detach().clone())
        for table in tables
        for name, buffer in table.items()
        if buffer is not None and _is_writable(buffer)
    ]

    @contextmanager
    def put_back() -> Iterator[None]:
        with _torch.preserving_versions([buffer for _, _, buffer, _ in kept]):
            try:
                yield
            finally:
                # All buffers are restored: batch norm writes without counting, so versions do not show which changed.
                with torch.no_grad():
                    for table, name, buffer, content in kept:
                        table[name] = buffer
                        buffer.copy_(content)

    return put_back


def _is_writable(buffer: Tensor) -> bool:
    # Several elements of an expanded buffer share one place, so no operation can write to it.
    plain = not (_dist.is_sharded(buffer) or buffer.is_inference() or buffer.is_sparse)
    sizes = zip(buffer.stride(), buffer.shape, strict=True)
    return plain and all(stride or size == 1 for stride, size in sizes)


# Activations on which the script called `retain_grad()`. Autograd keeps no list of them, so the calls are noted.
_retained: Any = WeakTensorKeyDictionary()
_noting: list[Patch] = []


def note_retained(*, wanted: bool) -> None:
    """Start or stop noting calls of `retain_grad()`: only sessions with rules on losses need the notes."""
    if wanted and not _noting:
        _noting.append(Patch(torch.Tensor, "retain_grad", _note))
    elif _noting and not wanted:
        _noting.pop().undo()
        _retained.clear()


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
