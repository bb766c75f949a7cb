"""Wait for training, which a torch optimizer announces."""

import logging
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradsurgeon import api
from gradsurgeon.actions.checks.idle_settings import watch_loads
from gradsurgeon.cli.review.model_loading import import_module
from gradsurgeon.common import _live
from gradsurgeon.common._patching import Patch
from gradsurgeon.distributed.deepspeed_engine import is_inside_engine
from gradsurgeon.errors import ModelError, RuleFileError
from gradsurgeon.integrations.launcher.messages import explain
from gradsurgeon.integrations.launcher.model_roots import roots_of
from gradsurgeon.integrations.launcher.models import Models, say_from_rank
from gradsurgeon.integrations.launcher.script_end import ScriptEnd
from gradsurgeon.integrations.launcher.settings import Settings
from gradsurgeon.language.schema import RuleSet
from gradsurgeon.runtime import registry
from gradsurgeon.runtime.running_steps import params_of
from gradsurgeon.tensors import _backward_calls
from gradsurgeon.tensors._backward_calls import BackwardCall


def activate(settings: Settings) -> None:
    """Put the rules on the models that this process will train; end the process if the rules are invalid."""
    paths = list(sys.path)
    try:
        for module in settings.modules:
            import_module(module)
        rules = _perturbed(api.load(settings.rules), settings)
    except (RuleFileError, ModelError) as error:
        explain()
        print(error, file=sys.stderr)  # noqa: T201 # the script has not begun
        raise SystemExit(2) from None
    # The script shall find what it finds without rules.
    sys.path[:] = paths
    # Events of updates are logged, the first trap or skipped step of a kind at once.
    logging.getLogger("gradsurgeon").addHandler(_LogLines(logging.WARNING))
    models = Models(settings, rules)
    end = ScriptEnd(models)
    TrainingDetector(models, end.prepare, end.first_step).install()


def _perturbed(rules: RuleSet, settings: Settings) -> RuleSet:
    if not settings.perturb:
        return rules
    noise = {
        "action": "perturb",
        "modules": "*",
        "where": {"owns_params": True},
        "eps": settings.perturb,
        "seed": settings.seed,
    }
    added = [
        {"id": "noise-of-inputs", "tensor": "input", **noise},
        {"id": "noise-of-output-gradients", "tensor": "output.grad", **noise},
    ]
    first = api.load({"version": 1, "rules": added}).rules
    return replace(rules, rules=(*first, *rules.rules))


class _LogLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # The sessions of the launcher write their lines themselves.
        if getattr(record, "is_said", False):
            return
        say_from_rank(record.getMessage())


class TrainingDetector:
    """Finds the models of the parameters that an optimizer holds, and calls ``prepare`` when some models got rules."""

    def __init__(
        self,
        models: Models,
        prepare: Callable[[], object] = int,
        first_step: Callable[[], object] = int,
    ) -> None:
        self._models = models
        self._prepare = prepare
        self._first_step = first_step
        # Number of parameters of each optimizer at the last search for its models.
        self._sizes = weakref.WeakKeyDictionary[Optimizer, int]()
        self._end_waiting: Callable[[], object] | None = None
        self._undo = ExitStack()

    def install(self) -> None:
        self._undo.callback(Patch(Optimizer, "__init__", self._construct).undo)
        # Registered before the hook of the sessions, which must find sessions that begin during a step.
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        registry.watch_steps()
        self._undo.callback(registry.unwatch_steps)
        self._undo.callback(watch_loads())
        distributed: Any = torch.distributed
        if distributed.is_available():
            # Early: a script that imports the function by name gets the patched one.
            patch = Patch(distributed, "destroy_process_group", self._before_destruction)
            self._undo.callback(patch.undo)
        self._undo.callback(self._stop_waiting)

    def uninstall(self) -> None:
        self._undo.close()

    def _construct(
        self, construct: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        # The first optimizer makes torch import its compiler, which allocates no garbage.
        with _live.uncollected():
            construct(optimizer, *args, **kwargs)
        with self._models.guard:
            self._search(optimizer)

    def _before_destruction(self, destroy: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Conclude the checks, which ask other ranks, before a process group is destroyed: the store may end with it."""
        for model in self._models.attached:
            with self._models.guard:
                model.attachment.controller.effects.conclude()
        destroy(*args, **kwargs)

    def _before_backward(self, call: BackwardCall) -> None:
        with self._models.guard:
            if call.accumulates:
                for optimizer in list(self._sizes):
                    self._search(optimizer)
                self._begin()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        del args, kwargs
        with self._models.guard:
            # The constructor of a copied or loaded optimizer never ran.
            self._search(optimizer)
            self._models.stepped(optimizer)
            if self._models.waiting():
                self._begin()
            first = self._first_step
            self._first_step = int
            first()

    def _search(self, optimizer: Optimizer) -> None:
        params = params_of(optimizer)
        known = self._sizes.get(optimizer)
        if known == len(params) or (known is not None and is_inside_engine(optimizer)):
            return
        # Lazy parameters have a shape by the first backward pass.
        if any(is_lazy(param) for param in params):
            self._sizes[optimizer] = -1
        else:
            self._sizes[optimizer] = len(params)
            if self._models.have_bound(params):
                return
            self._models.attach(roots_of(params), params, optimizer)
            self._prepare()
        if self._end_waiting is None:
            self._end_waiting = _backward_calls.before(self._before_backward)

    def _stop_waiting(self) -> None:
        if self._end_waiting is not None:
            self._end_waiting()
            self._end_waiting = None

    def _begin(self) -> None:
        self._stop_waiting()
        self._models.begin(list(self._sizes))
        if self._models.attached:
            self._prepare()
