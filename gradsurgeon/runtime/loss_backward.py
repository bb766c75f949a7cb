"""One backward pass of several named losses, with rules on the gradient of each."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.weak import WeakTensorKeyDictionary

from gradsurgeon import _dist, _numbers, _torch
from gradsurgeon._patching import Patch
from gradsurgeon.distributed import data_parallel
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime import current_pass, loss_rules
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.loss_rules import REST, DueLossRule, LossRules, NamedPass, in_order
from gradsurgeon.tensors.backward_graph import BackwardGraph, roots_of
from gradsurgeon.tensors.inner_products import Contributions, weighted_sum

# The gradients of single losses must add up to the gradient of their sum, except for rounding, which is large in half
# precision.
_TOLERANCE, _ROUNDING = 0.05, 1e-3
_TWICE = (
    "rule {rule}: the gradients that the single losses give {name} do not add up to the gradient of their sum (off by "
    "{off:.3g} of {size:.3g}): the graph cannot be run twice. Possible causes: a custom autograd function that writes to "
    "its saved tensors, or a checkpoint that draws other random numbers (preserve_rng_state=False)"
)


def before_plain_pass(
    sessions: Collection[LossRules], graph: BackwardGraph, inputs: Sequence[Tensor]
) -> None:
    """Meet the other ranks before a pass without named losses, if ranks average it: all ranks use the plain sum.

    Args:
        sessions: the sessions that have rules on losses.
        graph: the graph that the pass runs through.
        inputs: the only leaves that get gradients; empty for all leaves.
    """
    if sessions and loss_rules.current.get() is None and data_parallel.is_any_awaiting():
        leaves = list(inputs or graph.leaves())
        for rules in in_order(sessions):
            rules.due(leaves, None)


def backward(
    losses: Mapping[str, Tensor],
    scaler: GradScaler | None,
    sessions: Collection[LossRules],
    modules: Iterable[nn.Module],
) -> None:
    """Run the backward pass of the sum of losses; rules of the sessions act on the gradient of each loss.

    Args:
        losses: scalars by name.
        scaler: multiplies the losses, unless it is ``None``.
        sessions: the sessions that have rules on losses.
        modules: the modules of all models of these sessions.
    """
    _check(losses)
    scaled = losses if scaler is None else {n: scaler.scale(loss) for n, loss in losses.items()}
    # Summed as a script would do it, so without a rule exactly the operations of a plain script run.
    total = reduce(operator.add, scaled.values())
    with ExitStack() as stack:
        due: list[DueLossRule] = []
        if sessions:
            leaves = list(BackwardGraph(roots_of([total])).leaves())
            stack.enter_context(current_pass.alone(leaves))
            due += [one for rules in in_order(sessions) for one in rules.due(leaves, losses)]
        named = NamedPass(due)
        stack.callback(loss_rules.current.reset, loss_rules.current.set(named))
        if due:
            stack.enter_context(_delivering(due, scaled, total, modules, named))
        torch.autograd.backward(total)
    if named.problem:
        raise GradSurgeonError(named.problem)


def _check(losses: object) -> None:
    if not isinstance(losses, Mapping) or not all(isinstance(one, str) and one for one in losses):
        raise TypeError(
            'pass the losses by name: gradsurgeon.backward({"seg": seg_loss, "depth": depth_loss})'
        )
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


@contextmanager
def _delivering(
    due: Sequence[DueLossRule],
    losses: Mapping[str, Tensor],
    total: Tensor,
    modules: Iterable[nn.Module],
    named: NamedPass,
) -> Iterator[None]:
    """Take the gradient of each loss; within the context, the training pass gives parameters combined gradients."""
    parts, modules = _parts(due, losses, total), list(modules)
    if not parts:
        yield
        return
    if any(one.groups for one in due) and any(isinstance(m, nn.SyncBatchNorm) for m in modules):
        # Ranks meet in the backward pass of these layers, but a loss may bypass a layer on some rank. Adding zero times
        # the sum makes each pass visit all layers that the pass of the sum visits.
        parts = {name: loss + total * 0.0 for name, loss in parts.items()}
    params = list({id(param): param for one in due for param in one.params.values()}.values())
    wrappers = [w for one in due for w in one.effects.context.ranks.wrappers_of([*one.params])]
    grads, tasks = _gradients(parts, params, modules, wrappers)
    with torch.no_grad():
        delivery = _Delivery(due, grads, _weights(due, grads, tasks), named)
    handles = [_torch.register_first(param, delivery.hook(param)) for param in params]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for param in params:
            _torch.forget_empty_hooks(param)
    delivery.check()


def _parts(
    due: Sequence[DueLossRule], losses: Mapping[str, Tensor], total: Tensor
) -> dict[str, Tensor]:
    """Return the losses that need a pass of their own, in an order that all ranks share.

    A model may meet other ranks in its backward pass (`SyncBatchNorm`), so all ranks run equally many passes. A loss
    that only another rank has is zero here.
    """
    names = dict.fromkeys(name for one in due for name in one.senders)
    elsewhere = {name for one in due if one.groups for name in one.losses}
    parts = {name: losses[name] for name in names if name in losses}
    others = [loss for name, loss in losses.items() if name not in names]
    if others and (parts or elsewhere):
        parts[REST] = reduce(operator.add, others)
    # A loss that only rules of other sessions name also belongs to `REST`.
    lacking = {name if name in names else REST for name in elsewhere} - parts.keys()
    parts |= dict.fromkeys(lacking, total * 0.0)
    return {name: parts[name] for name in (*names, REST) if name in parts}


def _weights(
    due: Sequence[DueLossRule], grads: Mapping[int, Mapping[str, Tensor]], tasks: Sequence[int]
) -> dict[int, Mapping[str, float]]:
    """Run the rules on the gradients; return the weights of the losses, by the ids of the parameters to combine.

    A loss without a weight is added unweighted.
    """
    sessions = {one.effects for one in due}
    given = {one: Contributions(grads, one.context.scaling.of(tasks)) for one in sessions}
    found: dict[int, Mapping[str, float]] = {}
    rules: dict[int, str] = {}
    for one in due:
        if (weights := one.effects.run(one, given[one.effects])) is None:
            continue
        for number, param in one.params.items():
            key = id(param)
            if key in found:
                # Binding refuses two such rules of one session.
                raise GradSurgeonError(
                    f"rule {one.rule.id}: another session combines the gradient of {one.name(number)} already, by the rule "
                    f"{rules[key]}: `exclude` the parameter from one of the two rules"
                )
            if key in grads:
                found[key], rules[key] = weights, one.rule.id
    return found


class _Delivery:
    """Gives parameters their combined gradients in the training pass, and compares it with the passes of single losses."""

    def __init__(
        self,
        due: Sequence[DueLossRule],
        grads: dict[int, dict[str, Tensor]],
        weights: Mapping[int, Mapping[str, float]],
        named: NamedPass,
    ) -> None:
        """Combine the gradients of single losses, and remove them from ``grads`` to free one copy per loss."""
        self._named, self._reached = named, frozenset(grads)
        self._accumulation = _torch.Accumulation()
        # Each rule checks once whether the passes agree; after that only the combined gradients are kept.
        self._asked = [one for one in due if one.effects.is_unverified(one.rule.id)]
        wanted = {id(param) for one in self._asked for param in one.params.values()}
        self._combined: dict[int, Tensor] = {}
        # By parameter, the sum of the gradients of single losses, and the sum of their norms. If losses cancel,
        # rounding is small next to each gradient, but not next to their sum.
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        # By parameter, the norm of the difference between the passes, and the sum of all norms.
        self._differences: dict[int, tuple[Tensor, Tensor]] = {}
        for key in self._reached:
            column = grads.pop(key)
            if key in wanted:
                norms = torch.stack([_numbers.norm(grad) for grad in column.values()])
                self._sums[key] = weighted_sum(column, {}), norms.sum()
            if key in weights:
                self._combined[key] = weighted_sum(column, weights[key])

    def hook(self, param: Tensor) -> Callable[[Tensor], Tensor | None]:
        key = id(param)

        @uncompiled
        def deliver(grad: Tensor | None) -> Tensor | None:
            # A hook of the script may call `torch.autograd.grad` meanwhile: such passes are ignored.
            if grad is None or not self._accumulation.runs(param):
                return None
            if key not in self._reached:
                self._named.astray.add(key)
            elif (known := self._sums.pop(key, None)) is not None:
                total, size = known
                with torch.no_grad():
                    off, size = _numbers.norm(grad - total), _numbers.norm(grad) + size
                self._differences[key] = off, size
            return self._combined.pop(key, None)

        deliver.__name__ = "gradsurgeon.backward"
        return deliver

    def check(self) -> None:
        """Refuse a graph in which the gradients of single losses do not add up to the gradient of their sum."""
        known = {key: (float(off), float(size)) for key, (off, size) in self._differences.items()}
        for one in self._asked:
            found = [(n, *known[id(p)]) for n, p in one.params.items() if id(p) in known]
            # A gradient of pure rounding, such as of a bias before a batch norm, differs in every pass.
            least = _ROUNDING * math.hypot(*(size for _, _, size in found))
            for number, off, size in found:
                if off > max(least, _TOLERANCE * size):
                    name = one.name(number)
                    raise GradSurgeonError(
                        _TWICE.format(rule=one.rule.id, name=name, off=off, size=size)
                    )
            # Non-finite gradients prove nothing about the graph, so the rule stays unverified.
            if found and math.isfinite(least):
                one.effects.verified.add(one.rule.id)


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


def _gradients(
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
    with data_parallel.extra_pass(wrappers), current_pass.taking() as tasks:
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
