"""Detects how a model changed since the rules were bound: names that moved, left or came.

The rules stay bound to the names in the plan. The session reports all other changes, with a remedy. It does not
bind again by itself, because its rules would then act in ways that no reviewed plan shows.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from gradsurgeon import _dist
from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.events import EventKind
from gradsurgeon.planning import Plan, bind, from_model, name_indexes, named_modules, slots
from gradsurgeon.planning.matching import examples
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import StepCounter
from gradsurgeon.runtime.module_hooks import ModuleHooks
from gradsurgeon.runtime.param_hooks import ParamHooks
from gradsurgeon.runtime.parameters import Place

# A walk over the model is too slow for every step. The first walk happens when the session also reports rules that
# have not fired; later walks use exponential back-off, so their cost vanishes in a long run.
_FIRST_LOOK = 3

_SWAPPED = (
    "got new content by a conversion, which drops hooks: gradsurgeon installed its hooks again"
)
_TAKEN_OFF = "lost its hooks, because other code removed them: gradsurgeon installed them again"
_REPLACED = "was replaced by another parameter: its rules act on the new one"
_SHARDED = (
    "its modules were sharded (fully_shard) after the rule was applied, so their gradients so far were summed as without "
    "the rule; it acts from the next pass on. Apply the rules after fully_shard"
)
_CONTAINER = (
    "the module that the rules were applied to is gone, but parts of it live on: the rules keep acting on these parts, "
    "but not on layers added to them later. Keep a reference to the object passed to apply, such as a container of models"
)
_GONE = (
    "is gone from its module, or is now tied to another parameter: its rules no longer act; apply the rules "
    "again once the model has its final form"
)
_RENAMED = (
    "has a new name ({names}): its rules keep acting, under the old name; they may have missed one step. "
    "Call gradsurgeon.apply(..., replace=True) to bind the rules to the new names"
)
_OTHER_MODULE = "was replaced by another module: its rules act on the new one"
_LATE = " from now on, and may have missed the steps since the replacement"
_NO_MODULE = (
    "is gone from the model, or torch.jit now runs it without hooks: rules on it no longer act"
)
_UNNOTICED = "was replaced or removed: no rule acted on it since then"


class ModelChanges:
    """Compares the model with the plan, at known changes and now and then; moves the rules if possible."""

    def __init__(
        self,
        model: nn.Module,
        context: Context,
        plan: Plan,
        param_hooks: ParamHooks,
        module_hooks: ModuleHooks,
    ) -> None:
        self._model = weakref.ref(model)
        self._context = context
        self._plan = plan
        self._param_hooks = param_hooks
        self._module_hooks = module_hooks
        manifest = plan.manifest
        self._known = {
            "params": {name for param in manifest.params for name in param.names},
            "modules": {name for module in manifest.modules for name in module.names},
        }
        # Aliases, by the canonical name of their parameter.
        self._alias_of = {alias: param.name for param in manifest.params for alias in param.aliases}
        self._steps = 0
        self._next = _FIRST_LOOK
        self._modules = weakref.WeakSet(model.modules())
        # The tensors that got gradients since their last update.
        self.arrived: set[int] = set()
        self._swapped: set[int] = set()
        self._lock = context.parameters.lock
        self._over = False

    def let_go(self) -> None:
        """Stop all checks: the session is about to remove its rules from the model."""
        with self._lock:
            self._over = True

    def check(self) -> None:
        if (model := self._model()) is not None:
            bind(self._plan.rules, from_model(model), alone=False)

    def unowned(self) -> list[int]:
        """Return the tensors that got gradients, and that belong to no optimizer that has stepped."""
        counters = self._context.counters
        return sorted(t for t in self.arrived if counters[t] is counters.common)

    @contextmanager
    def swapping(self, params: Sequence[Tensor]) -> Iterator[None]:
        with self._context.parameters.without_references(params) as tensors:
            yield
        self._swapped.update(tensor for tensor in tensors if self._param_hooks.revive(tensor))

    def after_step(self, counter: StepCounter) -> None:
        self._steps += 1
        if self._model() is None:
            step = self._context.counters.latest
            self._context.event_log.notice_once("container", _CONTAINER, step=step, warn=True)
        if self._steps >= self._next:
            self._next = 2 * self._steps
            self.compare()
        self.arrived.difference_update(counter.tensors)
        by_counter = self._context.by_counter
        if not by_counter.any_always and self._context.rests(counter.step + 1):
            return
        # `OptimizerWatch` calls `rearm` before each step of an optimizer, unless its rules rest.
        common = counter is self._context.counters.common
        if common or (not by_counter.any_always and self._context.rests(counter.step)):
            self.rearm()
        if taken_off := [t for t in self._param_hooks.taken_off() if self._param_hooks.rearm(t)]:
            self._tell_params("hook-rearmed", taken_off, _TAKEN_OFF)

    def before_forward(self) -> None:
        params = self._context.parameters.params()
        # Between passes, a sharded model has other parameters than at a step.
        if not any(param is not None and _dist.is_sharded(param) for param in params):
            self.compare(at_once=True)
            self.rearm()

    def find_again(self) -> None:
        self.compare()
        self.rearm()

    def knows(self, module: nn.Module) -> bool:
        return module in self._modules

    def rearm(self) -> list[int]:
        """Move rules to parameters that replaced others; return the tensors that were replaced or are gone."""
        with self._lock:
            return [] if self._over else self._rearm()

    def _rearm(self) -> list[int]:
        swapped, self._swapped = sorted(self._swapped), set()
        self._tell_params("hook-rearmed", swapped, _SWAPPED)
        if not self._param_hooks.replaced():
            return []
        self.compare()  # the parameters may only have moved
        replaced = self._param_hooks.replaced()
        params = [self._context.parameters.param(tensor) for tensor in replaced]
        if any(param is not None and _dist.is_sharded(param) for param in params):
            self.check()
            self._context.ranks.look_again()
            if (model := self._model()) is not None:
                # Hooks of `fully_shard` give each module a tensor of its own, so ours must run before them.
                rules = self._module_hooks.put_first(named_modules(model))
                self._tell_of_sharding(rules)
        there = [tensor for tensor in replaced if self._param_hooks.rearm(tensor)]
        self._tell_params("hook-rearmed", there, _REPLACED)
        self._tell_params("hook-lost", [t for t in replaced if t not in there], _GONE)
        return replaced

    def _tell_of_sharding(self, rules: Collection[str]) -> None:
        """Warn of rules on modules that missed the first pass, because their modules were sharded one by one."""
        event_log, step = self._context.event_log, self._context.counters.latest
        for rule, *_ in event_log.never_fired():
            if rule in rules:
                event_log.notice_once("sharded", _SHARDED, rule=rule, step=step, warn=True)

    def compare(self, *, closing: bool = False, at_once: bool = False) -> None:
        """Find the parameters and modules of the plan in the current model, and report the changes.

        ``at_once``: no forward pass has run through the new parts yet. ``closing``: report changes that went
        unnoticed as events, without warnings.
        """
        with self._lock:
            if (model := self._model()) is not None and not self._over:
                self._compare(model, closing=closing, at_once=at_once)

    def _compare(self, model: nn.Module, *, closing: bool, at_once: bool) -> None:
        self._modules = weakref.WeakSet(model.modules())
        renamed = self._follow_params(model)
        text = _RENAMED.format(names=shorten_names(list(renamed.values())))
        self._tell_params("hook-rearmed", list(renamed), text, warn=not closing)
        exchanged = self._module_hooks.refresh(named_modules(model))
        gone = [name for name, there in exchanged if not there]
        others = [name for name, there in exchanged if there]
        if closing:
            self._tell_params("hook-lost", self._param_hooks.replaced(), _UNNOTICED, warn=False)
            self._tell("hook-lost", others + gone, _UNNOTICED, noun="module ", warn=False)
        else:
            text = _OTHER_MODULE + ("" if at_once else _LATE)
            self._tell("hook-rearmed", others, text, noun="module ")
            self._tell("hook-lost", gone, _NO_MODULE, noun="module ")
        if not at_once:
            # Not reported at once: the script or the launcher may still apply rules to the new parts.
            self._mention_new(model, warn=not closing)

    def _follow_params(self, model: nn.Module) -> Mapping[int, str]:
        tensors = {name: tensor for tensor, name in enumerate(self._context.program.names)}
        places: dict[int, Place] = {}
        moved: dict[int, tuple[str, Place]] = {}
        for slot in slots(model):
            place = (slot.owner._parameters, slot.key)  # noqa: SLF001 # where modules keep them
            param = place[0][place[1]]
            # A known parameter was in the model before, maybe in another place.
            carried = self._context.parameters.tensor_of(param)
            tensor = tensors.get(slot.name)
            if tensor is not None and carried in (None, tensor):
                places.setdefault(tensor, place)
            elif (first := self._alias_of.get(slot.name)) is not None:
                owner, key = places.get(tensors.get(first, -1), ({}, ""))
                if key and owner[key] is not param:  # no longer tied, so it is a new parameter
                    del self._alias_of[slot.name]
                    self._known["params"].discard(slot.name)
            elif tensor is None and carried is not None:
                moved.setdefault(carried, (slot.name, place))
        self._context.parameters.move({**{i: place for i, (_, place) in moved.items()}, **places})
        known = self._known["params"]
        renamed = {i: n for i, (n, _) in moved.items() if i not in places and n not in known}
        known.update(renamed.values())
        return renamed

    def _mention_new(self, model: nn.Module, *, warn: bool) -> None:
        now = {"params": {slot.name for slot in slots(model)}, "modules": set(named_modules(model))}
        new = {kind: names - self._known[kind] for kind, names in now.items()}
        if not any(new.values()):
            return
        indexes = name_indexes(from_model(model))
        step = self._context.counters.latest
        for rule in self._plan.rules.rules:
            if rule.target not in indexes or not self._plan.of(rule.id):
                continue
            index, names = indexes[rule.target], new[rule.target]
            gained = [thing for thing in index.select(rule) if names.issuperset(thing.names)]
            if gained:
                text = (
                    f"matches {len(gained)} {index.noun}{'s' if len(gained) > 1 else ''} that came after the "
                    f"rules were applied{examples(gained)}, but does not act there: call "
                    "gradsurgeon.apply(..., replace=True) once the model has its final form"
                )
                self._context.event_log.emit("notice", text, rule=rule.id, step=step, warn=warn)
        for kind, names in new.items():
            self._known[kind] |= names

    def _tell_params(
        self, kind: EventKind, tensors: Sequence[int], text: str, *, warn: bool = True
    ) -> None:
        self._tell(kind, [self._context.program.names[i] for i in tensors], text, warn=warn)

    def _tell(
        self, kind: EventKind, names: Sequence[str], text: str, *, noun: str = "", warn: bool = True
    ) -> None:
        """Emit an event for every name, and one warning for all names: a conversion changes many parameters."""
        if not names:
            return
        event_log, step = self._context.event_log, self._context.counters.latest
        for name in names:
            event_log.emit(kind, f"{noun}{printable(name)} {text}", step=step, name=name)
        if warn:
            each = ": each" if len(names) > 1 else ""
            event_log.warn(f"{noun}{shorten_names(names)}{each} {text}")
