"""What has become of the model since the rules were bound: names that moved, left or came.

The rules stay bound to the names that the plan has. Whatever else the model has by now is said, with
the remedy: a session that bound itself anew would do what nobody has read in a plan.
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
from gradsurgeon.runtime.module_hooks import ModuleHooks
from gradsurgeon.runtime.param_hooks import ParamHooks
from gradsurgeon.runtime.parameters import Place
from gradsurgeon.runtime.step_counter import StepCounter

# A walk over the model is too much for every step. The first one comes when a rule that has not fired
# is mentioned as well; later ones ever more seldom, so that they cost nothing in the long run.
_FIRST_LOOK = 3

_SWAPPED = (
    "got another content by a conversion, which takes no hooks along: they were installed anew"
)
_TAKEN_OFF = "has lost its hooks, which somebody has taken off: they were put on anew"
_REPLACED = "was replaced by another parameter: its rules act on the new one"
_SHARDED = (
    "its modules were sharded after it was applied (fully_shard), and what they have sent back so far was summed as without "
    "it; it acts from the next pass on. Apply the rules after fully_shard"
)
_CONTAINER = (
    "the module that the rules were applied to is gone, and parts of it live on: the rules go on acting on these, but a layer "
    "that is put into one of them later gets none. Keep what you pass to apply, such as a container of several models"
)
_GONE = (
    "is gone from its module, or is one with another parameter now: its rules no longer act; apply them "
    "again after the model has its final form"
)
_RENAMED = (
    "has a new name ({names}): its rules go on acting, under the old name; one step may have passed "
    "without them. Call gradsurgeon.apply(..., replace=True) to bind them by the names of now"
)
_OTHER_MODULE = "was replaced by another module: its rules act on the new one"
_LATE = " from now on, and may have missed the steps since it was put there"
_NO_MODULE = "is gone from the model, or torch.jit runs it now, which calls no hook: rules on it no longer act"
_UNNOTICED = "was replaced or taken out: no rule has acted on it since"


class ModelChanges:
    """Compares the model with the plan, for a reason and now and then; rules go on where they can."""

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
        # Names that stand for the parameter of another name.
        self._alias_of = {alias: param.name for param in manifest.params for alias in param.aliases}
        self._steps = 0
        self._next = _FIRST_LOOK
        self._modules = weakref.WeakSet(model.modules())
        # The tensors that have got gradients since their last update.
        self.arrived: set[int] = set()
        self._swapped: set[int] = set()
        self._lock = context.parameters.lock
        self._over = False

    def let_go(self) -> None:
        """Leave the model alone from now on: its rules are about to be taken off."""
        with self._lock:
            self._over = True

    def check(self) -> None:
        if (model := self._model()) is not None:
            bind(self._plan.rules, from_model(model), alone=False)

    def unowned(self) -> list[int]:
        """Return the tensors that get gradients and that no optimizer owns which has stepped."""
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
        # An optimizer that is about to step asks by itself, unless its rules rest.
        common = counter is self._context.counters.common
        if common or (not by_counter.any_always and self._context.rests(counter.step)):
            self.rearm()
        if taken_off := [t for t in self._param_hooks.taken_off() if self._param_hooks.rearm(t)]:
            self._tell_params("hook-rearmed", taken_off, _TAKEN_OFF)

    def before_forward(self) -> None:
        params = self._context.parameters.params()
        # Between its passes a sharded model has other parameters than when it steps.
        if not any(param is not None and _dist.is_sharded(param) for param in params):
            self.compare(at_once=True)
            self.rearm()

    def find_again(self) -> None:
        self.compare()
        self.rearm()

    def knows(self, module: nn.Module) -> bool:
        return module in self._modules

    def rearm(self) -> list[int]:
        """Let rules act on parameters that took the place of others; return what was replaced or is gone."""
        with self._lock:
            return [] if self._over else self._rearm()

    def _rearm(self) -> list[int]:
        swapped, self._swapped = sorted(self._swapped), set()
        self._tell_params("hook-rearmed", swapped, _SWAPPED)
        if not self._param_hooks.replaced():
            return []
        self.compare()  # they may have moved
        replaced = self._param_hooks.replaced()
        params = [self._context.parameters.param(tensor) for tensor in replaced]
        if any(param is not None and _dist.is_sharded(param) for param in params):
            self.check()
            self._context.ranks.look_again()
            if (model := self._model()) is not None:
                # Those of `fully_shard` give each module a tensor of its own.
                rules = self._module_hooks.put_first(named_modules(model))
                self._tell_of_sharding(rules)
        there = [tensor for tensor in replaced if self._param_hooks.rearm(tensor)]
        self._tell_params("hook-rearmed", there, _REPLACED)
        self._tell_params("hook-lost", [t for t in replaced if t not in there], _GONE)
        return replaced

    def _tell_of_sharding(self, rules: Collection[str]) -> None:
        """Say of which rules on modules the first pass has gone by, whose modules were sharded one by one."""
        event_log, step = self._context.event_log, self._context.counters.latest
        for rule, *_ in event_log.never_fired():
            if rule in rules:
                event_log.notice_once("sharded", _SHARDED, rule=rule, step=step, warn=True)

    def compare(self, *, closing: bool = False, at_once: bool = False) -> None:
        """Find the parameters and modules of the plan in the model as it is now.

        ``at_once``: no forward pass has gone through what has come. ``closing``: say what went unnoticed,
        but warn of nothing any more.
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
            # The script, or the launcher in its place, may yet bind what has come.
            self._mention_new(model, warn=not closing)

    def _follow_params(self, model: nn.Module) -> Mapping[int, str]:
        tensors = {name: tensor for tensor, name in enumerate(self._context.program.names)}
        places: dict[int, Place] = {}
        moved: dict[int, tuple[str, Place]] = {}
        for slot in slots(model):
            place = (slot.owner._parameters, slot.key)  # noqa: SLF001 # where modules keep them
            param = place[0][place[1]]
            # One that is known has been there before, maybe elsewhere.
            carried = self._context.parameters.tensor_of(param)
            tensor = tensors.get(slot.name)
            if tensor is not None and carried in (None, tensor):
                places.setdefault(tensor, place)
            elif (first := self._alias_of.get(slot.name)) is not None:
                owner, key = places.get(tensors.get(first, -1), ({}, ""))
                if key and owner[key] is not param:  # tied no longer, and so a new one
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
                    f"rules were applied{examples(gained)}, and does not act there: call "
                    "gradsurgeon.apply(..., replace=True) once the model has its form"
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
        """Note an event for every name, and warn once for all: a conversion concerns many."""
        if not names:
            return
        event_log, step = self._context.event_log, self._context.counters.latest
        for name in names:
            event_log.emit(kind, f"{noun}{printable(name)} {text}", step=step, name=name)
        if warn:
            each = ": each" if len(names) > 1 else ""
            event_log.warn(f"{noun}{shorten_names(names)}{each} {text}")
