"""One backward pass of several named losses, with rules on the gradient of each."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from gradsurgeon import _numbers, _torch
from gradsurgeon.distributed import data_parallel
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime import loss_rules, running_passes
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.loss_effects import DueLossRule
from gradsurgeon.runtime.loss_gradients import gradients
from gradsurgeon.runtime.loss_rules import REST, LossRules, NamedPass, in_order
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
            stack.enter_context(running_passes.alone(leaves))
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
    grads, tasks = gradients(parts, params, modules, wrappers)
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
