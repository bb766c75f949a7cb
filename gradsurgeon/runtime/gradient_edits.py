"""Edits of the gradients in ``.grad``: many in one call, and in place if nothing else holds their memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _torch
from gradsurgeon.actions import ByNorm, Edit, Rule
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule
from gradsurgeon.runtime.edit_effect import LEFT_ALONE, changed, check_layout
from gradsurgeon.runtime.gradients import Gradients


def edit_gradients(
    context: Context,
    bound_rule: BoundRule,
    gradients: Gradients,
    tensors: Sequence[int],
    frozen: Collection[int] = (),
) -> None:
    """Edit some of the gradients that a rule matched, and count how many changed.

    Args:
        context: the context of the session.
        bound_rule: the rule.
        gradients: the gradients in true units.
        tensors: the tensors to edit.
        frozen: tensors that are hidden from the optimizer, so a norm over the rule leaves them out.
    """
    rule = bound_rule.rule
    edit = context.edits[rule.id]
    if not bound_rule.keeps_zero:
        for tensor in tensors:
            check_layout(rule, gradients[tensor], context.program.names[tensor])
    if edit.by_norm is not None:
        if edit.by_norm.over_rule and frozen:
            tensors = [tensor for tensor in tensors if tensor not in frozen]
        if tensors:
            _by_norm(context, bound_rule, edit.by_norm, gradients, tensors)
    else:
        _elementwise(context, rule, edit, gradients, tensors)


def _elementwise(
    context: Context, rule: Rule, edit: Edit, gradients: Gradients, tensors: Sequence[int]
) -> None:
    event_log, grads = context.event_log, gradients.of(tensors)
    parts = _dist.parts(grads)
    answers = changed(edit, parts)
    event_log.count_changed(rule.id, sum(answer is True for answer in answers))
    for answer in answers:
        if isinstance(answer, Tensor):
            event_log.count_changed(rule.id, answer)
    # All ranks that share a gradient must agree on whether it changed: a rank that measured it again would wait
    # for the other ranks. So all ranks write a shared gradient, even if nothing changes.
    written = [
        tensor
        for tensor, grad, part, answer in zip(tensors, grads, parts, answers, strict=True)
        if answer is not False or grad is not part
    ]
    _apply(edit, _dist.parts(gradients.writable(written)))


def _by_norm(
    context: Context,
    bound_rule: BoundRule,
    edit: ByNorm,
    gradients: Gradients,
    tensors: Sequence[int],
) -> None:
    event_log, rule = context.event_log, bound_rule.rule
    norms = gradients.norms(tensors, edit.order)
    if edit.over_rule:
        norms = _numbers.over(norms, edit.order)
    factors, step = edit.factor(norms), bound_rule.counter.step

    def tell(norms: Tensor) -> None:
        if not norms.isfinite().all():
            event_log.emit("notice", LEFT_ALONE, rule=rule.id, step=step)
        if not _torch.is_host(factors):
            shorter = edit.factor(norms).expand(len(tensors)) < 1.0
            event_log.count_changed(rule.id, shorter.sum())

    # Events and counts are computed on the host; norms of a device arrive there later.
    event_log.when_read(norms, tell)
    shorten(context, rule.id, gradients, tensors, factors)


def shorten(
    context: Context, rule: str, gradients: Gradients, tensors: Sequence[int], factors: Tensor
) -> None:
    """Multiply gradients by factors, one for all or one for each; a factor of 1 changes nothing.

    On the host, the changed gradients are counted. On a device, counting would wait, so the caller counts.
    """
    if not _torch.is_host(factors):
        _shorten(gradients.writable(tensors), factors)
        return
    numbers = factors.tolist() * (len(tensors) // len(factors))
    biting = [i for i, factor in zip(tensors, numbers, strict=True) if factor < 1.0]
    context.event_log.count_changed(rule, len(biting))
    if biting:
        shortening = [factor for factor in numbers if factor < 1.0]
        _numbers.scale_(_dist.parts(gradients.writable(biting)), shortening)


def _shorten(grads: Sequence[Tensor], factors: Tensor) -> None:
    parts = _dist.parts(grads)
    if len(factors) == 1:
        _numbers.multiply_(parts, factors)
        return
    for part, factor in zip(parts, factors.unsqueeze(1).unbind(), strict=True):
        _numbers.multiply_([part], factor)


def _apply(edit: Edit, grads: list[Tensor]) -> None:
    dense = [grad for grad in grads if grad.layout is torch.strided]
    if dense:
        edit.apply_(dense)
    if len(dense) < len(grads):
        for grad in grads:
            if grad.layout is not torch.strided:
                # `copy_` keeps the tensor object, so the optimizer and the script see the edit.
                grad.copy_(_numbers.on_values(edit.apply, grad))
