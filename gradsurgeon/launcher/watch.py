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
from gradsurgeon.launcher import idle
from gradsurgeon.launcher.attached import Attached
from gradsurgeon.launcher.discovery import leaves_of, roots_of
from gradsurgeon.launcher.ending import Ending
from gradsurgeon.launcher.importing import give_way, say
from gradsurgeon.launcher.models import Models
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.warned import Warned
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
        idle.busy()
        print(error, file=sys.stderr)  # noqa: T201 # the script has not begun
        raise SystemExit(2) from None
    models = Models(settings, rules)
    Warned(models).install()
    ending = Ending(settings, models)
    Watch(settings, models, ending).begin()


class Watch:
    """Looks at every optimizer once, and finds the models whose parameters it owns."""

    def __init__(self, settings: Settings, models: Models, ending: Ending) -> None:
        self._settings = settings
        self._models = models
        self._ending = ending
        # How many parameters each held when it was last looked at.
        self._known: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._backward: Patch | None = None
        self._optimized = False
        self._checked = self._broken = False

    def begin(self) -> None:
        """Start waiting."""
        Patch(Optimizer, "__init__", self._construct)
        # Before the hook of the sessions, which is to find those that come during a step.
        register_optimizer_step_pre_hook(self._on_step)
        registry.watch_steps()
        self._wait_for_backward()

    def _construct(
        self, construct: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        # The first one makes torch import its compiler, of which all stays.
        with _live.uncollected():
            construct(optimizer, *args, **kwargs)
        self._born(optimizer)

    def _wait_for_backward(self) -> None:
        """Wait for the first backward pass: the first of all, or the first of a new model."""
        if self._backward is None:
            self._backward = Patch(torch.autograd, "backward", self._on_backward)
        # One that could not be taken off, because the script has put its own over it, is still called.
        self._backward.active = True

    def _stop_waiting(self) -> None:
        if self._backward is not None and self._backward.undo():
            self._backward = None

    def _on_backward(self, original: Callable[..., None], *tensors: Any, **named: Any) -> None:
        self._stop_waiting()
        self._guarded(lambda: self._before_pass(tensors[0] if tensors else named["tensors"]))
        original(*tensors, **named)

    def _born(self, optimizer: Optimizer) -> None:
        """Find the models of an optimizer that is new, or has got new parameters."""
        # Wrappers that skip the constructor of their base may have no groups of their own.
        groups = getattr(optimizer, "param_groups", ())
        if any(is_lazy(param) for group in groups for param in group["params"]):
            return  # The first backward pass finds them: they have a shape by then.
        size = sum(len(group["params"]) for group in groups)
        if self._known.get(optimizer) != size:
            self._known[optimizer] = size
            self._optimized = True
            self._guarded(lambda: self._find(optimizer))

    def _before_pass(self, tensors: Any) -> None:
        if updated := self._models.updated():
            self._settle(updated)
        waiting = not (self._optimized or self._checked)
        leaves = leaves_of(tensors) if waiting or self._models.provisional else []
        if waiting:
            self._models.look(leaves)
        else:
            self._begin()
        if self._models.provisional:
            self._models.reached(leaves)
            self._ending.expect()
            self._wait_for_backward()

    def _settle(self, updated: Sequence[Attached]) -> None:
        """Take updates by hand for granted, now that one was seen."""
        self._models.settle(updated)
        self._begin()
        self._check()

    def _check(self) -> None:
        if not self._checked:
            self._checked = True
            self._models.check()
            self._guarded(self._ending.dry_run)

    def _on_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        del args, kwargs
        # One that was copied or loaded has not been built.
        self._born(optimizer)
        if self._models.provisional:
            self._stop_waiting()
            updated = self._models.updated()
            self._guarded(lambda: self._settle(updated) if updated else self._models.drop())
        if self._models.waiting:
            self._stop_waiting()
            self._guarded(self._begin)
        self._check()

    def _find(self, optimizer: Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        claimed = self._models.claim(optimizer, params)
        if not self._models.cover(params):
            self._models.attach(roots_of(params), params, optimizer)
            claimed = True
        if claimed:
            self._ending.expect()
            self._wait_for_backward()

    def _begin(self) -> None:
        self._models.begin(list(self._known))
        if self._models.attached:
            self._ending.expect()

    def _guarded(self, work: Any) -> None:
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
            give_way(self._settings, error)
