"""Waits for something to be trained: an optimizer that is built, or a first backward pass without."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradsurgeon import _live, api
from gradsurgeon._patching import Patch
from gradsurgeon.errors import GradSurgeonError, RuleFileError
from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.attached_model import AttachedModel
from gradsurgeon.launcher.discovery import leaves_of, roots_of
from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.models import Models
from gradsurgeon.launcher.script_end import ScriptEnd
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.warning_lines import WarningLines
from gradsurgeon.runtime import registry


def activate(settings: Settings) -> None:
    """Put the rules on whatever this process is going to train.

    Raises:
        SystemExit: the rule file is not valid. Hours of training without rules would not be what
            was asked for.
    """
    try:
        rules = api.load(settings.rules)
    except RuleFileError as error:
        launch_status.note(launch_status.EXPLAINED)
        print(error, file=sys.stderr)  # noqa: T201 # the script has not begun
        raise SystemExit(2) from None
    models = Models(settings, rules)
    WarningLines(models).install()
    TrainingDetector(settings, models, ScriptEnd(settings, models)).install()


class TrainingDetector:
    """Asks every optimizer once for its parameters, and finds the models that these belong to."""

    def __init__(self, settings: Settings, models: Models, script_end: ScriptEnd) -> None:
        self._settings = settings
        self._models = models
        self._script_end = script_end
        # How many parameters each had when its models were last searched.
        self._sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._backward_patch: Patch | None = None
        self._has_optimizer = self._checked = self._broken = False

    def install(self) -> None:
        Patch(Optimizer, "__init__", self._construct)
        # Before the hook of the sessions, which is to find those that come during a step.
        register_optimizer_step_pre_hook(self._before_step)
        registry.watch_steps()
        self._wait_for_backward()

    def _construct(
        self, construct: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        # The first one makes torch import its compiler, of which all stays.
        with _live.uncollected():
            construct(optimizer, *args, **kwargs)
        self._search(optimizer)

    def _wait_for_backward(self) -> None:
        """Wait for the first backward pass: the first of all, or the first of a new model."""
        if self._backward_patch is None:
            self._backward_patch = Patch(torch.autograd, "backward", self._backward)
        # One that could not be taken off, because the script has put its own over it, is still called.
        self._backward_patch.active = True

    def _stop_waiting(self) -> None:
        if self._backward_patch is not None and self._backward_patch.undo():
            self._backward_patch = None

    def _backward(self, original: Callable[..., None], *tensors: Any, **named: Any) -> None:
        self._stop_waiting()
        roots = tensors[0] if tensors else named["tensors"]
        self._guarded(lambda: self._before_backward(roots))
        original(*tensors, **named)

    def _before_backward(self, roots: Any) -> None:
        if updated := self._models.updated_by_hand():
            self._keep(updated)
        undecided = not (self._has_optimizer or self._checked)
        leaves = leaves_of(roots) if undecided or self._models.provisional else []
        if undecided:
            self._models.attach_reached(leaves)
        else:
            self._begin()
        if self._models.provisional:
            self._models.before_backward(leaves)
            self._script_end.prepare()
            self._wait_for_backward()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        del args, kwargs
        # One that was copied or loaded has not been built.
        self._search(optimizer)
        if self._models.provisional:
            self._stop_waiting()
            updated = self._models.updated_by_hand()
            self._guarded(
                lambda: self._keep(updated) if updated else self._models.discard_provisional()
            )
        if self._models.is_any_waiting:
            self._stop_waiting()
            self._guarded(self._begin)
        self._check()

    def _search(self, optimizer: Optimizer) -> None:
        """Find the models of an optimizer that is new, or has got new parameters."""
        # Wrappers that skip the constructor of their base may have no groups of their own.
        groups = getattr(optimizer, "param_groups", ())
        size = sum(len(group["params"]) for group in groups)
        if self._sizes.get(optimizer) == size:
            return
        params = [param for group in groups for param in group["params"]]
        if any(map(is_lazy, params)):
            return  # The first backward pass finds them: they have a shape by then.
        self._sizes[optimizer] = size
        self._has_optimizer = True
        self._guarded(lambda: self._attach(optimizer, params))

    def _attach(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
        given = self._models.give_to(optimizer, params)
        if not self._models.cover(params):
            self._models.attach(roots_of(params), params, optimizer)
            given = True
        if given:
            self._script_end.prepare()
            self._wait_for_backward()

    def _keep(self, updated: Sequence[AttachedModel]) -> None:
        """Count updates by hand as training, now that one was seen."""
        self._models.keep(updated)
        self._begin()
        self._check()

    def _begin(self) -> None:
        self._models.begin(list(self._sizes))
        if self._models.attached:
            self._script_end.prepare()

    def _check(self) -> None:
        if not self._checked:
            self._checked = True
            self._models.check()
            self._guarded(self._script_end.dry_run)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do the launcher's work; whatever goes wrong with it, the script goes on.

        Raises:
            GradSurgeonError: the rules cannot be put on the model: that is the script's user's business.
        """
        if self._broken:
            return
        try:
            work()
        except GradSurgeonError:
            raise
        except Exception as error:  # noqa: BLE001 # a script must not die of its debugger
            self._broken = True
            say(f"internal error, please report it: {type(error).__name__}")
            launch_status.run_without_rules(self._settings, error)
