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
from gradsurgeon.runtime.capture import check_capture
from gradsurgeon.runtime.compiled import in_backward
from gradsurgeon.runtime.deciding import changes
from gradsurgeon.runtime.passes import Passes
from gradsurgeon.runtime.scaling import in_true_units, unscaled
from gradsurgeon.runtime.shortening import Shortening
from gradsurgeon.runtime.state import State

_graph_task = _torch.graph_task  # looked up once: this is the busiest line of all


class Hook:
    """A hook on one tensor that reaches its session weakly and never travels with a copy."""

    # torch warns when a parameter with hooks is pickled for another process, unless told that the
    # hook is meant to stay behind.
    __torch_unserializable__ = True

    def __init__(self, state: State, passes: Passes, tensor: int, label: str) -> None:
        self._state = weakref.ref(state)
        self._passes = weakref.ref(passes)
        self._tensor = tensor
        # torch names the hook by this in its messages about wrong return values.
        self.__name__ = label

    def _live(self, *, paused: bool = False) -> tuple[State, Passes] | None:
        state, passes = self._state(), self._passes()
        if state is None or passes is None or (state.paused and not paused):
            return None
        return state, passes


class PassHook(Hook):
    """Post-accumulate hook: notes the arrival of one gradient."""

    def __init__(self, state: State, passes: Passes, tensor: int, label: str) -> None:
        super().__init__(state, passes, tensor, label)
        self._arrivals = passes.arrivals

    @property
    def tensor(self) -> int:
        return self._tensor

    def belongs_to(self, state: State) -> bool:
        return self._state() is state

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
        state, passes = live
        if self._tensor in state.trapped and param.grad is not None and state.ranks.averaging:
            passes.current().own[self._tensor] = _numbers.norms([param.grad])[0]
        passes.arrived(self._tensor, state)


class TensorHook(Hook):
    """Tensor hook: the rules at `backward` on one parameter, in file order."""

    def __init__(
        self, state: State, passes: Passes, tensor: int, label: str, rules: tuple[Rule, ...]
    ) -> None:
        super().__init__(state, passes, tensor, label)
        self._rules = rules

    @in_backward
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Return the edited contribution, ``None`` to leave it as it is."""
        live = self._live()
        # A custom autograd function may return None for an input.
        if live is None or grad is None:
            return None
        state, passes = live
        clock = state.clocks[self._tensor]
        due = [rule for rule in self._rules if rule.steps.due(clock.step)]
        param = state.targets.param(self._tensor)
        if not due or param is None:
            return None
        if not passes.is_training(param):
            text = "torch.autograd.grad() is not training: its results are left alone"
            state.journal.once("autograd.grad", text, step=clock.step)
            return None
        check_capture(state)
        self._note_sum(state, passes, param, due)
        out = grad
        for rule in due:
            out = self._act(state, passes, rule, out)
            if not isinstance(rule, CaptureRule):
                state.journal.fired(rule.id, clock.step)
        return None if out is grad or state.mode == "observe" else out

    def _note_sum(self, state: State, passes: Passes, param: Tensor, due: Sequence[Rule]) -> None:
        """Note whether this pass adds to a gradient that is there already, where that matters.

        Scripts that zero in place keep the tensor, so that its elements have to be asked; one tensor for
        each pass, and none once it has been said.
        """
        if param.grad is None or _torch.is_capturing() or not state.clocks[self._tensor].passes:
            return
        bounds = [rule.id for rule in due if not rule.linear]
        added_to = passes.current().added_to
        if not added_to and any(not state.journal.said("accumulation", rule) for rule in bounds):
            with torch.no_grad():
                added_to[self._tensor] = (_dist.local(param.grad) != 0).any()

    def _act(self, state: State, passes: Passes, rule: Rule, grad: Tensor) -> Tensor:
        if isinstance(rule, EditRule):
            return self._edit(state, rule, grad)
        if isinstance(rule, CaptureRule):
            name, step = state.program.names[self._tensor], state.clocks[self._tensor].step
            true = _dist.whole(unscaled(grad, state.scaling.scale))
            state.captures.keep(rule, name, step, true)
            return grad
        with torch.no_grad():
            true = unscaled(grad, state.scaling.scale)
            found = {stat: _statistics.statistic(stat, true) for stat in getattr(rule, "stats", ())}
        passes.current().logged.setdefault(rule.id, {})[self._tensor] = found
        return grad

    def _edit(self, state: State, rule: Rule, grad: Tensor) -> Tensor:
        check_layout(rule, grad, state.program.names[self._tensor])
        if _dist.is_partial(grad) and not rule.linear:
            raise GradSurgeonError(_pending(rule, state.program.names[self._tensor]))
        edit = state.edits[rule.id]
        scale = state.scaling.scale
        part = _dist.local(grad)
        if edit.by_norm is not None:
            shortening = Shortening(edit.by_norm, part, scale)
            shortening.tell(state, rule.id, state.clocks[self._tensor].step)
            out = shortening.of(part)
            return _dist.like(out, grad) if _dist.is_sharded(grad) else out
        with torch.no_grad():
            changed = changes(edit, unscaled(part, scale))
            state.journal.altered(rule.id, changed)
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
