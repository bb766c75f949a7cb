"""What happens while a backward pass runs: edits of contributions, and the order of arrival.

A `TensorHook` acts on what this pass contributes to one parameter. A `PassHook` only notes that a
parameter has received its gradient, and sees to it that the session looks once the pass is over.
Both hold the session weakly: a post-accumulate hook that reaches a parameter would make a cycle that
Python cannot collect.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _statistics, _torch
from gradsurgeon.actions import CaptureRule, EditRule, Rule
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.compile_support import in_backward
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.cuda_graphs import refuse_graph_capture
from gradsurgeon.runtime.edit_effect import NormClip, changes
from gradsurgeon.runtime.scaler_watch import in_true_units, unscaled

_graph_task = _torch.graph_task  # looked up once: this is the busiest line of all


class Hook:
    """A hook on one tensor that reaches its session weakly and never travels with a copy."""

    # torch warns when a parameter with hooks is pickled for another process, unless told that the
    # hook is meant to stay behind.
    __torch_unserializable__ = True

    def __init__(self, context: Context, passes: BackwardWatch, tensor: int, label: str) -> None:
        self._context = weakref.ref(context)
        self._backward = weakref.ref(passes)
        self._tensor = tensor
        # torch names the hook by this in its messages about wrong return values.
        self.__name__ = label

    def _live(self, *, paused: bool = False) -> tuple[Context, BackwardWatch] | None:
        context, passes = self._context(), self._backward()
        if context is None or passes is None or (context.paused and not paused):
            return None
        return context, passes


class PassHook(Hook):
    """Post-accumulate hook: notes the arrival of one gradient."""

    def __init__(self, context: Context, passes: BackwardWatch, tensor: int, label: str) -> None:
        super().__init__(context, passes, tensor, label)
        self._arrivals = passes.arrivals

    @property
    def tensor(self) -> int:
        return self._tensor

    def belongs_to(self, context: Context) -> bool:
        return self._context() is context

    @in_backward
    def __call__(self, param: Tensor) -> None:
        """Note the arrival, and under DDP what this rank has got before it is averaged."""
        task, order = self._arrivals.now
        if task == _graph_task():
            order.append(self._tensor)
            return
        # Other ranks may wait for one that is paused.
        if (live := self._live(paused=_dist.world() > 1)) is None:
            return
        context, passes = live
        if self._tensor in context.trapped and param.grad is not None and context.ranks.is_reducing:
            passes.current().own[self._tensor] = _numbers.norms([param.grad])[0]
        passes.arrived(self._tensor, context)


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

    @in_backward
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Return the edited contribution, ``None`` to leave it as it is."""
        live = self._live()
        # A custom autograd function may return None for an input.
        if live is None or grad is None:
            return None
        context, passes = live
        counter = context.counters[self._tensor]
        due = [rule for rule in self._rules if rule.steps.due(counter.step)]
        param = context.parameters.param(self._tensor)
        if not due or param is None:
            return None
        if not passes.is_training(param):
            text = "torch.autograd.grad() is not training: its results are left alone"
            context.event_log.once("autograd.grad", text, step=counter.step)
            return None
        refuse_graph_capture(context)
        self._note_sum(context, passes, param, due)
        out = grad
        for rule in due:
            out = self._act(context, passes, rule, out)
            if not isinstance(rule, CaptureRule):
                context.event_log.fired(rule.id, counter.step)
        return None if out is grad or context.mode == "observe" else out

    def _note_sum(
        self, context: Context, passes: BackwardWatch, param: Tensor, due: Sequence[Rule]
    ) -> None:
        """Note whether this pass adds to a gradient that is there already, where that matters.

        Scripts that zero in place keep the tensor, so that its elements have to be asked; one tensor for
        each pass, and none once it has been said.
        """
        if param.grad is None or _torch.is_capturing() or not context.counters[self._tensor].passes:
            return
        bounds = [rule.id for rule in due if not rule.linear]
        added_to = passes.current().added_to
        if not added_to and any(
            not context.event_log.said("accumulation", rule) for rule in bounds
        ):
            with torch.no_grad():
                added_to[self._tensor] = (_dist.local(param.grad) != 0).any()

    def _act(self, context: Context, passes: BackwardWatch, rule: Rule, grad: Tensor) -> Tensor:
        if isinstance(rule, EditRule):
            return self._edit(context, rule, grad)
        if isinstance(rule, CaptureRule):
            name, step = context.program.names[self._tensor], context.counters[self._tensor].step
            true = _dist.whole(unscaled(grad, context.scaling.scale))
            context.captures.keep(rule, name, step, true)
            return grad
        with torch.no_grad():
            true = unscaled(grad, context.scaling.scale)
            found = {stat: _statistics.statistic(stat, true) for stat in getattr(rule, "stats", ())}
        passes.current().logged.setdefault(rule.id, {})[self._tensor] = found
        return grad

    def _edit(self, context: Context, rule: Rule, grad: Tensor) -> Tensor:
        check_layout(rule, grad, context.program.names[self._tensor])
        if _dist.is_partial(grad) and not rule.linear:
            raise GradSurgeonError(_pending(rule, context.program.names[self._tensor]))
        edit = context.edits[rule.id]
        scale = context.scaling.scale
        part = _dist.local(grad)
        if edit.by_norm is not None:
            clip = NormClip(edit.by_norm, part, scale)
            clip.tell(context, rule.id, context.counters[self._tensor].step)
            out = clip.of(part)
            return _dist.like(out, grad) if _dist.is_sharded(grad) else out
        with torch.no_grad():
            changed = changes(edit, unscaled(part, scale))
            context.event_log.altered(rule.id, changed)
        if changed is False:
            return grad
        out = _numbers.on_values(in_true_units(edit.apply, scale), part)
        return _dist.like(out, grad) if _dist.is_sharded(grad) else out


def _pending(rule: Rule, name: str) -> str:
    return (
        f"rule {rule.id}: what a backward pass contributes to {name} is still to be summed over the "
        "ranks of its tensor-parallel group, so that a bound on this rank's addend bounds nothing; use "
        "`at: step`"
    )


def check_layout(rule: Rule, grad: Tensor, name: str) -> None:
    """Refuse what binding could not foresee: an edit that would fill a sparse gradient.

    Raises:
        GradSurgeonError: naming rule and parameter.
    """
    if grad.layout != torch.strided and not rule.keeps_zero:
        raise GradSurgeonError(
            f"rule {rule.id}: the gradient of {name} is sparse and the bounds exclude 0, so the result "
            "would be dense; include 0 in the bounds, or exclude the parameter"
        )
