"""Waits for something to be trained: an optimizer that is built, or weights that change without one."""

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradsurgeon import _backward_calls, _dist, _live, api
from gradsurgeon._backward_calls import BackwardCall
from gradsurgeon._patching import Patch
from gradsurgeon.errors import GradSurgeonError, RuleFileError
from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.discovery import roots_of
from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.models import Models
from gradsurgeon.launcher.script_end import ScriptEnd
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.warning_lines import WarningLines
from gradsurgeon.runtime import registry
from gradsurgeon.tensors.backward_graph import BackwardGraph
from gradsurgeon.tensors.backward_graph import roots_of as roots_of_pass

_SAMPLED = 16


def activate(settings: Settings) -> None:
    """Put the rules on whatever this process is going to train; stop it where they are not valid."""
    try:
        rules = api.load(settings.rules)
    except RuleFileError as error:
        launch_status.note(launch_status.EXPLAINED)
        print(error, file=sys.stderr)  # noqa: T201 # the script has not begun
        raise SystemExit(launch_status.REFUSED) from None
    models = Models(settings, rules)
    WarningLines(models).install()
    TrainingDetector(models, ScriptEnd(settings, models)).install()


class TrainingDetector:
    """Finds the models of the parameters that an optimizer has, or that change without one.

    Without a ``script_end`` who has installed it looks after the end, and after rules that match nothing.
    """

    def __init__(self, models: Models, script_end: ScriptEnd | None = None) -> None:
        self._models = models
        self._script_end = script_end
        # How many parameters each had when its models were last searched.
        self._sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        # Those that were there before, as long as they have not stepped.
        self._idle: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._end_waiting: Callable[[], None] | None = None
        self._checked = False
        # A few elements of the parameters that the last pass reached, as long as there is no optimizer.
        self._samples: dict[int, tuple[Tensor, Tensor]] = {}
        self._undo = ExitStack()

    def install(self) -> None:
        self._undo.callback(Patch(Optimizer, "__init__", self._construct).undo)
        # Before the hook of the sessions, which is to find those that come during a step.
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        registry.watch_steps()
        self._undo.callback(registry.unwatch_steps)
        self._wait_for_backward()

    def uninstall(self) -> None:
        """Wait for nothing any more. The sessions stay on the models."""
        self._stop_waiting()
        self._samples.clear()
        self._undo.close()

    def search_built(self) -> None:
        """Find the models of the optimizers that are there already, whether they are going to step or not."""
        gc.collect()  # What only waits to be collected is never going to.
        for optimizer in _live.instances(Optimizer):
            self._idle.add(optimizer)
            try:
                self._search(optimizer)
            except GradSurgeonError:
                # Whoever trains with it is told then.
                self._sizes.pop(optimizer, None)

    def _construct(
        self, construct: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        # The first one makes torch import its compiler, of which all stays.
        with _live.uncollected():
            construct(optimizer, *args, **kwargs)
        self._search(optimizer)

    def _wait_for_backward(self) -> None:
        """Wait for the first backward pass of a new model, and for all as long as there is no optimizer."""
        if self._end_waiting is None:
            self._end_waiting = _backward_calls.before(self._before_backward)

    def _stop_waiting(self) -> None:
        if self._end_waiting is not None:
            self._end_waiting()
            self._end_waiting = None

    def _before_backward(self, call: BackwardCall) -> None:
        if not call.accumulates:
            return
        self._stop_waiting()
        for optimizer in list(self._sizes):
            self._search(optimizer)
        if set(self._sizes) - set(self._idle):
            self._samples.clear()  # They keep the parameters that they were taken of.
        else:
            self._search_updated(call.outputs)
        self._begin()

    def _search_updated(self, outputs: Sequence[Any]) -> None:
        """Find the models that a script updates by hand: their weights have changed since the last pass."""
        roots = roots_of_pass(outputs)
        leaves = [leaf for leaf in BackwardGraph(roots).leaves() if isinstance(leaf, nn.Parameter)]
        before, self._samples = self._samples, {id(leaf): (leaf, _sample(leaf)) for leaf in leaves}
        updated = [
            leaf
            for identity, (leaf, now) in self._samples.items()
            if identity in before and not torch.equal(before[identity][1], now)
        ]
        self._wait_for_backward()
        if updated and not self._models.cover(updated):
            say(
                "weights are updated without an optimizer of torch: the rules act from the second update on"
            )
            self._models.attach(roots_of(updated), leaves, None)
            self._check()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        del args, kwargs
        self._idle.discard(optimizer)
        # One that was copied or loaded has not been built.
        self._search(optimizer)
        if self._models.is_any_waiting:
            self._stop_waiting()
            self._begin()
        self._check()

    def _check(self) -> None:
        if self._script_end is not None and not self._checked:
            self._checked = True
            self._models.check()
            self._script_end.dry_run()

    def _prepare(self) -> None:
        if self._script_end is not None:
            self._script_end.prepare()

    def _search(self, optimizer: Optimizer) -> None:
        # Wrappers that skip the constructor of their base may have no groups of their own.
        groups = getattr(optimizer, "param_groups", ())
        size = sum(len(group["params"]) for group in groups)
        if self._sizes.get(optimizer) == size:
            return
        params = [param for group in groups for param in group["params"]]
        if any(map(is_lazy, params)):
            # They have a shape by the first backward pass.
            self._sizes[optimizer] = -1
            self._wait_for_backward()
            return
        self._sizes[optimizer] = size
        if not self._models.cover(params):
            self._models.attach(roots_of(params), params, optimizer)
            self._prepare()
            self._wait_for_backward()

    def _begin(self) -> None:
        self._models.begin(list(self._sizes))
        if self._models.attached:
            self._prepare()


def _sample(param: Tensor) -> Tensor:
    return _dist.local(param).detach().reshape(-1)[:_SAMPLED].clone()
