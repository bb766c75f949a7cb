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
from gradsurgeon.runtime.context import Context
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
    scaled = losses
    if scaler is not None:
        scaled = {name: scaler.scale(loss) for name, loss in losses.items()}
    # Summed as a script would do it, so without a rule exactly the operations of a plain script run.
    total = reduce(operator.add, scaled.values())
    graph = BackwardGraph(roots_of([total]))
    with ExitStack() as stack:
        due: list[DueLossRule] = []
        if sessions:
            leaves = list(graph.leaves())
            for rules in sessions:
                due += rules.due(leaves, losses)
        if due:
            stack.enter_context(alone(graph))
        named = NamedPass(due)
        parts = _parts(due, scaled)
        if parts:
            grads, tasks = _gradients(due, parts, total, list(modules))
            with torch.no_grad():
                named.combine(grads, _weights(due, grads, tasks))
        stack.enter_context(named.delivering())
        torch.autograd.backward(total)


def _check(losses: object) -> None:
    if not isinstance(losses, Mapping):
        raise TypeError(_NAMES)
    for name in losses:
        if not isinstance(name, str) or not name:
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
    named: set[str] = set()
    parts: dict[str, Tensor] = {}
    for due_rule in due:
        named.update(due_rule.senders)
        for name in due_rule.senders:
            if name in losses:
                parts[name] = losses[name]
    others = [losses[name] for name in sorted(losses) if name not in named]
    if parts and others:
        parts[REST] = reduce(operator.add, others)
    return parts


def _weights(
    due: Sequence[DueLossRule], grads: Mapping[int, Mapping[str, Tensor]], tasks: Sequence[int]
) -> dict[int, Mapping[str, float]]:
    """Run the rules on the gradients; return the weights other than 1, by the ids of the parameters to combine."""
    contributions: dict[Context, Contributions] = {}
    weights_by_param: dict[int, Mapping[str, float]] = {}
    # The id of the rule that combines the gradients of a parameter.
    combining: dict[int, str] = {}
    for due_rule in due:
        session = due_rule.effect.context
        if session not in contributions:
            contributions[session] = Contributions(grads, session.scaling.pop_scale(tasks))
        weights = due_rule.effect.run(due_rule, contributions[session])
        if not weights:
            continue
        rule_id = due_rule.effect.rule.id
        for index, param in due_rule.params.items():
            key = id(param)
            if key in combining:
                # Binding refuses two such rules of one session.
                other = combining[key]
                raise GradSurgeonError(
                    _TWO.format(rule=rule_id, name=due_rule.name(index), other=other)
                )
            if key in grads:
                combining[key] = rule_id
                weights_by_param[key] = weights
    return weights_by_param


def _gradients(
    due: Sequence[DueLossRule],
    parts: Mapping[str, Tensor],
    total: Tensor,
    modules: Sequence[nn.Module],
) -> tuple[dict[int, dict[str, Tensor]], Sequence[int]]:
    """Return the gradients by the ids of the parameters and then by loss, and the numbers of the passes.

    ``modules`` may change their buffers, because checkpointing runs their forward pass again.
    """
    grads: dict[int, dict[str, Tensor]] = {}
    params: dict[int, Tensor] = {}
    wrappers = []
    are_averaged = False
    for due_rule in due:
        params.update(due_rule.params_by_id())
        wrappers += due_rule.effect.context.ranks.wrappers_of([*due_rule.params])
        if due_rule.groups:
            are_averaged = True
    if are_averaged and any(isinstance(module, nn.SyncBatchNorm) for module in modules):
        # Ranks meet in the backward pass of these layers, but a loss may bypass a layer on some rank. Adding zero times
        # the sum makes each pass visit all layers that the pass of the sum visits.
        parts = {name: loss + total * 0.0 for name, loss in parts.items()}
    wanted = list(params.values())
    put_back = _buffers_of(modules)
    with data_parallel.extra_pass(wrappers), taking() as tasks:
        for name, loss in parts.items():
            with _torch.without_hooks(wanted), put_back(), _retained_put_back(loss):
                for param, grad in _gradients_of(name, loss, wanted):
                    grads.setdefault(id(param), {})[name] = grad
    return grads, tasks


def _gradients_of(
    name: str, loss: Tensor, params: Sequence[Tensor]
) -> Sequence[tuple[Tensor, Tensor]]:
    if not loss.requires_grad:
        return []
    grads: Sequence[Tensor | None] = torch.autograd.grad(
        loss, params, retain_graph=True, allow_unused=True
    )
    reached = []
    for param, grad in zip(params, grads, strict=True):
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise GradSurgeonError(_SPARSE.format(name=printable(name)))
        reached.append((param, grad))
    return reached


def _buffers_of(modules: Iterable[nn.Module]) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes contexts, each of which restores the buffers of modules at its end."""
    kept = []
    buffers = []
    for module in dict.fromkeys(modules):
        table = module._buffers  # noqa: SLF001 # where they are
        for name, buffer in table.items():
            if buffer is not None and _is_writable(buffer):
                buffers.append(buffer)
                kept.append((table, name, buffer, buffer.detach().clone()))

    @contextmanager
    def put_back() -> Iterator[None]:
        with _torch.preserving_versions(buffers):
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
    if _dist.is_sharded(buffer) or buffer.is_inference() or buffer.is_sparse:
        return False
    for stride, size in zip(buffer.stride(), buffer.shape, strict=True):
        # Several elements of an expanded buffer share one place, so no operation can write to it.
        if stride == 0 and size != 1:
            return False
    return True


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
    kept = []
    # The list is a copy: another thread may note a tensor meanwhile.
    references = _retained.keyrefs()
    if references:
        # Other threads may run passes through the graphs of other tensors.
        nodes = set(BackwardGraph(roots_of([loss])).nodes())
        for reference in references:
            tensor = reference()
            if tensor is not None and tensor.retains_grad and tensor.grad_fn in nodes:
                kept.append((tensor, tensor.grad))
    try:
        yield
    finally:
        for tensor, grad in kept:
            tensor.grad = grad
