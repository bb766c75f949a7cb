"""What happens while a backward pass runs: edits of contributions, and the order of arrival.

A `TensorHook` acts on what this pass contributes to one parameter. A `PassHook` only notes that a
parameter has received its gradient, and sees to it that the session looks once the pass is over.
Both hold the session weakly: a post-accumulate hook that reaches a parameter would make a cycle that
Python cannot collect.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from torch import Tensor

from gradsurgeon import _dist, _numbers, _torch
from gradsurgeon.actions import Rule
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime.capture import check_capture
from gradsurgeon.runtime.compiled import in_backward
from gradsurgeon.runtime.scaling import in_true_units, unscaled
from gradsurgeon.runtime.state import State

LEFT_ALONE = "the norm is not finite: the gradients were left alone"
# A backward pass that raised never ends, so its entry stays; more than this many are forgotten.
_MOST_OPEN = 16


@dataclass(slots=True)
class Pass:
    """One backward pass: the tensors in the order in which they received their gradients."""

    order: list[int] = field(default_factory=list)
    # When each arrived: passes inside one another are put into one order by this.
    times: list[int] = field(default_factory=list)
    logged: dict[str, dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    # Norms of what this rank alone has contributed, where an average over ranks is about to follow.
    own: dict[int, Tensor] = field(default_factory=dict)
    # It began on gradients that were there before: one more micro-batch of the same step.
    continued: bool = False
    # What it has yet to reach; known only where the engine does not tell when it is through.
    awaited: set[int] | None = None

    def followed_by(self, other: Pass) -> Pass:
        """Return both as one pass."""
        for rule, rows in other.logged.items():
            self.logged.setdefault(rule, {}).update(rows)
        arrivals = sorted(
            zip([*self.times, *other.times], [*self.order, *other.order], strict=True)
        )
        return Pass(
            [tensor for _, tensor in arrivals],
            [time for time, _ in arrivals],
            self.logged,
            {**self.own, **other.own},
            continued=self.continued or other.continued,
        )


class Passes:
    """Opens a `Pass` at its first gradient and hands it over when the backward pass has ended."""

    def __init__(
        self,
        finished: Callable[[Pass], None],
        *,
        waits: Callable[[], bool],
        begins: Callable[[], None],
    ) -> None:
        self._finished = finished
        # Whether what ended inside another pass may wait for that one, or for the update.
        self._waits = waits
        self._begins = begins
        self._inner: Pass | None = None
        self._time = count()
        self._open: dict[int, Pass] = {}
        self._training: tuple[int, bool] = (-1, False)
        # Handed over while it was still running; what comes after that is no pass of its own.
        self._early: tuple[int, Pass] = (-1, Pass())

    def current(self) -> Pass:
        """Return the pass that is running, opening it if this is its first gradient."""
        task = _torch.graph_task()
        running = self._open.get(task)
        if running is None:
            if self._early[0] == task:
                return self._early[1]
            self._begins()
            while len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
            running = self._open[task] = Pass()
            if _torch.in_compiled_autograd():
                running.awaited = set()
            else:
                _torch.queue_callback(partial(self._ending, task))
        return running

    def arrived(self, tensor: int, state: State) -> None:
        """Note that a tensor has received its gradient."""
        running = self.current()
        running.order.append(tensor)
        running.times.append(next(self._time))
        first = len(running.order) == 1
        if first:
            check_capture(state)
        # Compiled autograd runs no callback at its end: the last gradient is the end.
        if running.awaited is None:
            return
        if first:
            params = ((i, state.targets.param(i)) for i in state.program.watched)
            running.awaited.update(i for i, p in params if p is not None and _torch.awaits(p))
        running.awaited.discard(tensor)
        if not running.awaited:
            task = _torch.graph_task()
            self._early = (task, running)
            self._ended(task)

    def is_training(self, param: Tensor) -> bool:
        """Tell a `backward()` from a `torch.autograd.grad()`; asked once per pass."""
        task = _torch.graph_task()
        if self._training[0] != task:
            self._training = (task, _torch.accumulates(param))
        return self._training[1]

    @in_backward
    def _ending(self, task: int) -> None:
        # Queued anew from inside a callback it runs after all others, such as that of DDP, which
        # copies the reduced gradients into place.
        _torch.queue_callback(partial(self._ended, task))

    @in_backward
    def _ended(self, task: int) -> None:
        running = self._open.pop(task, None)
        if running is None:
            return
        if self._inner is not None:
            running, self._inner = self._inner.followed_by(running), None
        if _torch.is_nested() and self._waits():
            self._inner = running
        else:
            self._finished(running)

    def settle(self) -> None:
        """Hand over what ended inside a pass that had nothing of its own to hand over."""
        if self._inner is not None:
            inner, self._inner = self._inner, None
            self._finished(inner)


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

    def _live(self) -> tuple[State, Passes] | None:
        state, passes = self._state(), self._passes()
        if state is None or passes is None or state.paused:
            return None
        return state, passes


class PassHook(Hook):
    """Post-accumulate hook: notes the arrival of one gradient."""

    @property
    def tensor(self) -> int:
        """The index of the parameter."""
        return self._tensor

    def belongs_to(self, state: State) -> bool:
        """Tell whether it is a hook of this session."""
        return self._state() is state

    @in_backward
    def __call__(self, param: Tensor) -> None:
        """Note the arrival, and under DDP what this rank has got before it is averaged."""
        if (live := self._live()) is None:
            return
        state, passes = live
        if self._tensor in state.trapped and param.grad is not None and state.ranks.averaging:
            with torch.no_grad():
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
        out = grad
        for rule in due:
            out = self._one(state, passes, rule, out)
            if rule.role != "capture":
                state.journal.fired(rule.id, clock.step)
        return None if out is grad or state.mode == "observe" else out

    def _one(self, state: State, passes: Passes, rule: Rule, grad: Tensor) -> Tensor:
        if rule.role == "edit":
            return self._edit(state, rule, grad)
        if rule.role == "capture":
            name, step = state.program.names[self._tensor], state.clocks[self._tensor].step
            true = _dist.whole(unscaled(grad, state.scaling.scale))
            state.captures.keep(rule, name, step, true)
            return grad
        with torch.no_grad():
            true = unscaled(grad, state.scaling.scale)
            found = {stat: _numbers.statistic(stat, true) for stat in getattr(rule, "stats", ())}
        passes.current().logged.setdefault(rule.id, {})[self._tensor] = found
        return grad

    def _edit(self, state: State, rule: Rule, grad: Tensor) -> Tensor:
        edit = state.edits[rule.id]
        check_layout(rule, grad, state.program.names[self._tensor])
        if _dist.is_partial(grad) and not rule.linear:
            raise GradSurgeonError(_pending(rule, state.program.names[self._tensor]))
        scale = state.scaling.scale
        part = _dist.local(grad)
        with torch.no_grad():
            true = unscaled(part, scale)
            state.journal.altered(rule.id, edit.alters(_numbers.values(true)))
            mention_giving_up(state, rule, true, state.clocks[self._tensor].step)
        out = _numbers.on_values(in_true_units(edit.apply, scale), part)
        return _dist.like(out, grad) if _dist.is_sharded(grad) else out


def _pending(rule: Rule, name: str) -> str:
    return (
        f"rule {rule.id}: what a backward pass contributes to {name} is still to be summed over the "
        "ranks of its tensor-parallel group, so that a bound on this rank's addend bounds nothing; use "
        "`at: step`"
    )


def mention_giving_up(state: State, rule: Rule, grad: Tensor, step: int) -> None:
    """Note where an edit leaves a gradient alone because it could only do harm."""
    gives_up = state.edits[rule.id].gives_up
    if gives_up is not None:
        state.journal.later(gives_up(grad), LEFT_ALONE, rule=rule.id, step=step)


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
