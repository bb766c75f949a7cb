"""Wait for training: an optimizer that is built, or weights that change without an optimizer."""

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
    """Put the rules on the models that this process will train; end the process if the rules are invalid."""
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
    """Finds the models of the parameters that an optimizer holds, or that change without an optimizer.

    Without a ``script_end``, the caller handles the end, and rules that match nothing.
    """

    def __init__(self, models: Models, script_end: ScriptEnd | None = None) -> None:
        self._models = models
        self._script_end = script_end
        # Number of parameters of each optimizer at the last search for its models.
        self._sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        # Optimizers that existed before, as long as they have not stepped.
        self._idle: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._end_waiting: Callable[[], None] | None = None
        self._checked = False
        # A few elements of the parameters that the last pass reached, while there is no optimizer.
        self._samples: dict[int, tuple[Tensor, Tensor]] = {}
        self._undo = ExitStack()

    def install(self) -> None:
        self._undo.callback(Patch(Optimizer, "__init__", self._construct).undo)
        # Registered before the hook of the sessions, which must find sessions that begin during a step.
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        registry.watch_steps()
        self._undo.callback(registry.unwatch_steps)
        self._wait_for_backward()

    def uninstall(self) -> None:
        """Stop waiting. The sessions stay on the models."""
        self._stop_waiting()
        self._samples.clear()
        self._undo.close()

    def search_built(self) -> None:
        """Find the models of the existing optimizers, whether they will step or not."""
        gc.collect()  # An unreachable optimizer will never step.
        for optimizer in _live.instances(Optimizer):
            self._idle.add(optimizer)
            try:
                self._search(optimizer)
            except GradSurgeonError:
                # The error is raised again when this optimizer steps.
                self._sizes.pop(optimizer, None)

    def _construct(
        self, construct: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        # The first optimizer makes torch import its compiler, which allocates no garbage.
        with _live.uncollected():
            construct(optimizer, *args, **kwargs)
        self._search(optimizer)

    def _wait_for_backward(self) -> None:
        """Wait for the first backward pass of a new model; without an optimizer, for every pass."""
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
            self._samples.clear()  # The samples keep their parameters alive.
        else:
            self._search_updated(call.outputs)
        self._begin()

    def _search_updated(self, outputs: Sequence[Any]) -> None:
        """Find the models that a script updates by hand: their weights changed since the last pass."""
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
            say("weights change without a torch optimizer: the rules act from the second update on")
            self._models.attach(roots_of(updated), leaves, None)
            self._check()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        del args, kwargs
        self._idle.discard(optimizer)
        # The constructor of a copied or loaded optimizer never ran.
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
        # A wrapper that skips the constructor of its base may have no groups.
        groups = getattr(optimizer, "param_groups", ())
        size = sum(len(group["params"]) for group in groups)
        if self._sizes.get(optimizer) == size:
            return
        params = [param for group in groups for param in group["params"]]
        if any(map(is_lazy, params)):
            # Lazy parameters have a shape by the first backward pass.
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
