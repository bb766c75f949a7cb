"""What happens while a backward pass runs: edits of contributions, and the order of arrival.

A `TensorHook` acts on what this pass contributes to one parameter. An `ArrivalHook` notes what only
several ranks have to know.
Both hold the session weakly: a post-accumulate hook that reaches a parameter would make a cycle that
Python cannot collect.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _statistics
from gradsurgeon.actions import CaptureRule, EditRule, Rule
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.cuda_graphs import refuse_graph_capture
from gradsurgeon.runtime.edit_effect import NormClip, changes
from gradsurgeon.runtime.scaler_watch import in_true_units, unscaled


class Hook:
    """A hook on one tensor that reaches its session weakly and never travels with a copy."""

    # torch warns when a parameter with hooks is pickled for another process, unless told that the
    # hook is meant to stay behind.
    __torch_unserializable__ = True

    def __init__(self, context: Context, passes: BackwardWatch, tensor: int, label: str) -> None:
        self._context = weakref.ref(context)
        self._backward = weakref.ref(passes)
        self.tensor = tensor
        # torch names the hook by this in its messages about wrong return values.
        self.__name__ = label

    def _live(self, *, paused: bool = False) -> tuple[Context, BackwardWatch] | None:
        context, passes = self._context(), self._backward()
        if context is None or passes is None or (context.paused and not paused):
            return None
        return context, passes


class ArrivalHook(Hook):
    """Post-accumulate hook on what several ranks train: notes what is gone when the pass is over.

    That is what this rank has contributed before DDP averages it, and the order in which a sharded model
    got its gradients, whose graph knows other tensors than the parameters.
    """

    @uncompiled
    def __call__(self, param: Tensor) -> None:
        # Other ranks may wait for one that is paused.
        if (live := self._live(paused=True)) is None:
            return
        context, passes = live
        passes.seen.order.append(self.tensor)
        if self.tensor in context.trapped and param.grad is not None and context.ranks.is_reducing:
            passes.seen.contributed[self.tensor] = _numbers.norms([param.grad])[0]


class TensorHook(Hook):
    """Tensor hook: the rules at `backward` on one parameter, in file order."""

    def __init__(
        self,
        context: Context,
        passes: BackwardWatch,
        tensor: int,
        label: str,
        rules: tuple[Rule, ...],
    ) -> None:
        super().__init__(context, passes, tensor, label)
        self._rules = rules

    @uncompiled
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        live = self._live(paused=True)
        # A custom autograd function may return None for an input.
        if live is None or grad is None:
            return None
        context, passes = live
        passes.seen.calls[self.tensor] += 1
        counter = context.counters[self.tensor]
        if context.paused:
            return None
        due = [rule for rule in self._rules if rule.steps.due(counter.step)]
        param = context.parameters.param(self.tensor)
        if not due or param is None:
            return None
        if not passes.is_training(param):
            text = "torch.autograd.grad() is not training: its results are left alone"
            context.event_log.once("autograd.grad", text, step=counter.step)
            return None
        refuse_graph_capture(context)
        out = grad
        for rule in due:
            out = self._act(context, passes, rule, out)
            if not isinstance(rule, CaptureRule):
                context.event_log.fired(rule.id, counter.step)
        return None if out is grad or context.mode == "observe" else out

    def _act(self, context: Context, passes: BackwardWatch, rule: Rule, grad: Tensor) -> Tensor:
        if isinstance(rule, EditRule):
            return self._edit(context, rule, grad)
        if isinstance(rule, CaptureRule):
            name, step = context.program.names[self.tensor], context.counters[self.tensor].step
            true = _dist.whole(unscaled(grad, context.scaling.scale))
            context.captures.keep(rule, name, step, true)
            return grad
        with torch.no_grad():
            true = unscaled(grad, context.scaling.scale)
            found = {stat: _statistics.statistic(stat, true) for stat in getattr(rule, "stats", ())}
        passes.seen.logged[rule.id][self.tensor] = found
        return grad

    def _edit(self, context: Context, rule: Rule, grad: Tensor) -> Tensor:
        name = context.program.names[self.tensor]
        check_layout(rule, grad, name)
        if _dist.is_partial(grad) and not rule.linear:
            raise GradSurgeonError(
                f"rule {rule.id}: what a backward pass contributes to {name} is still to be summed over the "
                "ranks of its tensor-parallel group, so that a bound on this rank's addend bounds nothing; "
                "use `at: step`"
            )
        edit = context.edits[rule.id]
        scale = context.scaling.scale
        part = _dist.local(grad)
        if edit.by_norm is not None:
            clip = NormClip(edit.by_norm, part, scale)
            clip.tell(context, rule.id, context.counters[self.tensor].step)
            out = clip.of(part)
        else:
            with torch.no_grad():
                changed = changes(edit, unscaled(part, scale))
                context.event_log.altered(rule.id, changed)
            if changed is False:
                return grad
            out = _numbers.on_values(in_true_units(edit.apply, scale), part)
        return _dist.like(out, grad) if _dist.is_sharded(grad) else out


def check_layout(rule: Rule, grad: Tensor, name: str) -> None:
    """Refuse what binding could not foresee: an edit that would fill a sparse gradient."""
    if grad.layout != torch.strided and not rule.keeps_zero:
        raise GradSurgeonError(
            f"rule {rule.id}: the gradient of {name} is sparse and the bounds exclude 0, so the result "
            "would be dense; include 0 in the bounds, or exclude the parameter"
        )
