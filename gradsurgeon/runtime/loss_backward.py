"""One backward pass of several named losses, with rules on the gradient of each."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from gradsurgeon import _numbers, _torch
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.runtime import loss_gradients, running_passes
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.loss_ranks import REST
from gradsurgeon.runtime.loss_rules import DueLossRule, LossRules
from gradsurgeon.runtime.named_pass import NamedPass, in_order, running
from gradsurgeon.tensors.backward_graph import BackwardGraph, roots_of
from gradsurgeon.tensors.inner_products import weighted_sum

# The gradients of single losses add up to that of their sum but for rounding, of which half precision has much.
_TOLERANCE, _ROUNDING = 0.05, 1e-3
# The gradient of each loss by the id of each parameter.
_Rows = Mapping[str, dict[int, Tensor | None]]


def backward(
    losses: Mapping[str, Tensor],
    scaler: GradScaler | None,
    sessions: Sequence[LossRules],
    modules: Iterable[nn.Module],
) -> None:
    """Run the backward pass of the sum of losses, and let the rules of sessions act on the gradient of each.

    Args:
        losses: scalars by name.
        scaler: what multiplies them, or ``None``.
        sessions: the rules on losses of each.
        modules: all of their models.
    """
    _check(losses)
    scaled = losses if scaler is None else {n: scaler.scale(loss) for n, loss in losses.items()}
    # As a script writes it, so that without a rule the very same operations run.
    total = reduce(operator.add, scaled.values())
    with ExitStack() as stack:
        due: list[DueLossRule] = []
        leaves: list[Tensor] = []
        if sessions:
            leaves += BackwardGraph(roots_of(list(scaled.values()))).leaves()
            stack.enter_context(running_passes.alone(leaves))
            due += [one for rules in in_order(sessions) for one in rules.due(leaves, losses)]
        named = NamedPass(due, leaves)
        stack.enter_context(running(named))
        if due:
            stack.enter_context(_delivering(due, scaled, total, modules, named))
        torch.autograd.backward(total)
    if named.unseen:
        raise GradSurgeonError(named.unseen[0])


def _check(losses: object) -> None:
    if not isinstance(losses, Mapping) or not all(isinstance(one, str) and one for one in losses):
        raise TypeError(
            'losses are given by name: gradsurgeon.backward({"seg": seg_loss, "depth": depth_loss})'
        )
    if not losses:
        raise ValueError("no loss is given: gradsurgeon.backward takes at least one")
    for name, loss in losses.items():
        called = f"the loss {printable(name)}"
        if not isinstance(loss, Tensor):
            raise TypeError(f"{called} is no tensor, but of the type {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(
                f"{called} has the shape {tuple(loss.shape)}, and a loss is one number: reduce it, as by `.mean()`"
            )


@contextmanager
def _delivering(
    due: Sequence[DueLossRule],
    losses: Mapping[str, Tensor],
    total: Tensor,
    modules: Iterable[nn.Module],
    named: NamedPass,
) -> Iterator[None]:
    params = list({id(param): param for one in due for param in one.params}.values())
    for one in due:
        one.rules.note_given(one, losses)
    modules = list(modules)
    parts = _parts(due, losses, total)
    if any(one.groups for one in due) and any(isinstance(m, nn.SyncBatchNorm) for m in modules):
        # Each pass goes wherever that of the sum goes: these layers meet in it, and a loss may go round one on some rank.
        parts = {name: loss + total * 0.0 for name, loss in parts.items()}
    if not parts:
        yield
        return
    wrappers = [
        wrapper for one in due for wrapper in one.rules.context.ranks.wrappers_of(one.tensors)
    ]
    taken, tasks = loss_gradients.gradients(parts, params, modules, wrappers)
    rows = {name: dict(zip(map(id, params), row, strict=True)) for name, row in taken.items()}
    del taken
    with torch.no_grad():
        delivery = _Delivery(due, rows, _weights(due, rows, tasks), named)
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
    """Return what takes a pass of its own, in the same order on all ranks.

    A model may meet other ranks in its backward pass (`SyncBatchNorm`): so that all run as many passes, what only
    another one has is one of zeros here.
    """
    names = dict.fromkeys(name for one in due for name in one.rule.losses or ())
    elsewhere = {name for one in due if one.groups for name in one.losses}
    parts = {name: losses[name] for name in names if name in losses}
    others = [loss for name, loss in losses.items() if name not in names]
    if others and (parts or elsewhere):
        parts[REST] = reduce(operator.add, others)
    # What it calls a loss that only other rules name is none of these either.
    lacking = {name if name in names else REST for name in elsewhere} - parts.keys()
    if lacking:
        parts |= dict.fromkeys(lacking, total * 0.0)
    return {name: parts[name] for name in (*names, REST) if name in parts}


def _weights(
    due: Sequence[DueLossRule], rows: _Rows, tasks: Sequence[int]
) -> dict[int, Mapping[str, float]]:
    """Let rules see the gradients; return the weights of the losses, by the ids of the parameters with a combined gradient.

    A loss without a weight is added as it is.
    """
    scales = {rules: rules.context.scaling.of(tasks) for rules in {one.rules for one in due}}
    found: dict[int, Mapping[str, float]] = {}
    reached = _reached(rows)
    for one in due:
        weights = one.rules.run(one, rows, scales[one.rules])
        if weights is None:
            continue
        keys = reached.intersection(map(id, one.params))
        if twice := found.keys() & keys:
            _refuse_two(due, one, twice)
        found |= dict.fromkeys(keys, weights)
    return found


def _reached(rows: _Rows) -> set[int]:
    return {key for row in rows.values() for key, grad in row.items() if grad is not None}


def _refuse_two(due: Sequence[DueLossRule], last: DueLossRule, params: Collection[int]) -> None:
    """Refuse rules of several sessions that combine the gradient of one parameter; of one session binding does."""
    for one in due:
        for tensor, param in zip(one.tensors, one.params, strict=True):
            if one is not last and one.rule.edits and id(param) in params:
                name = printable(one.rules.context.program.names[tensor])
                raise GradSurgeonError(
                    f"rule {last.rule.id}: another session combines the gradient of {name} already, by the rule "
                    f"{one.rule.id}: leave it out of one of them by `exclude`"
                )


class _Delivery:
    """Gives parameters their combined gradients in the pass that trains, and compares that pass with the others."""

    def __init__(
        self,
        due: Sequence[DueLossRule],
        rows: _Rows,
        weights: Mapping[int, Mapping[str, float]],
        named: NamedPass,
    ) -> None:
        """Combine the gradients of single losses, and take them out of ``rows``: there are as many copies as losses."""
        self._due, self._named = due, named
        self._reached = _reached(rows)
        # Whether the passes agree is asked once of each rule; after that only the combined gradients are kept.
        self._asked = [
            one
            for one in due
            if one.rule.id not in one.rules.repeat and not one.rules.combines_inputs
        ]
        wanted = {id(param) for one in self._asked for param in one.params}
        self._combined: dict[int, Tensor | None] = {}
        self._sums: dict[int, _Sum] = {}
        for key in self._reached:
            column = {name: row.pop(key) for name, row in rows.items()}
            if key in wanted:
                self._sums[key] = _Sum.of(column)
            if key in weights:
                self._combined[key] = weighted_sum(column, weights[key])
        self._astray: set[int] = set()
        self._accumulation = _torch.Accumulation()
        self._differences: list[tuple[int, Tensor, Tensor]] = []

    def hook(self, param: Tensor) -> Callable[[Tensor], Tensor | None]:
        key = id(param)

        @uncompiled
        def deliver(grad: Tensor | None) -> Tensor | None:
            # A hook of the script's may ask for gradients of its own (`torch.autograd.grad`) meanwhile.
            if grad is None or not self._accumulation.runs(param):
                return None
            if key not in self._reached:
                self._astray.add(key)
                return None
            if (known := self._sums.pop(key, None)) is not None:
                with torch.no_grad():
                    off, size = _numbers.norm(grad - known.total), _numbers.norm(grad) + known.size
                self._differences.append((key, off, size))
            return self._combined.pop(key, None)

        deliver.__name__ = "gradsurgeon.backward"
        return deliver

    def check(self) -> None:
        """Refuse a graph in which the gradients of single losses do not add up to that of their sum."""
        for one in self._due:
            names = one.rules.context.program.names
            for tensor, param in zip(one.tensors, one.params, strict=True):
                if id(param) in self._astray:
                    self._named.astray(one.rule, names[tensor])
        of = {key: (float(off), float(size)) for key, off, size in self._differences}
        for one in self._asked:
            names = one.rules.context.program.names
            known = {
                t: of[id(p)] for t, p in zip(one.tensors, one.params, strict=True) if id(p) in of
            }
            # A gradient that is nothing but rounding, as of a bias before a batch norm, differs in every pass.
            least = _ROUNDING * math.hypot(*(size for _, size in known.values()))
            for tensor, (off, size) in known.items():
                if off > max(least, _TOLERANCE * size):
                    raise GradSurgeonError(
                        f"rule {one.rule.id}: the gradients that the single losses give {printable(names[tensor])} do not "
                        f"add up to that of their sum (off by {off:.3g} of {size:.3g}): the graph cannot be gone through "
                        "twice. A custom autograd function that writes to what it has saved does that, or a "
                        "checkpoint that draws other random numbers (preserve_rng_state=False)"
                    )
            # Of gradients that are not finite nothing is known.
            if known and math.isfinite(least):
                one.rules.repeat.add(one.rule.id)


class _Sum(NamedTuple):
    """The sum of the gradients of single losses, and the sum of their norms, 0-dim.

    Where losses cancel, rounding is small beside each gradient, and not beside their sum.
    """

    total: Tensor
    size: Tensor

    @classmethod
    def of(cls, grads: Mapping[str, Tensor | None]) -> _Sum:
        norms = [_numbers.norm(grad) for grad in grads.values() if grad is not None]
        total = weighted_sum(grads, {})
        assert total is not None  # noqa: S101 # of a parameter that some loss reaches
        return cls(total, torch.stack(norms).sum())
