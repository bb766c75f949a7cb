"""Detects how a model changed since the rules were bound. Rules on parameters act on no others than they were bound to."""

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from gradsurgeon.common.events import EventKind
from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.language.planning import Plan, bind, from_model, name_indexes, named_modules, slots
from gradsurgeon.language.planning.matching import examples
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.module_hooks import ModuleHooks
from gradsurgeon.runtime.param_hooks import ParamHooks
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors import _dist

_SWAPPED = "got new content by a conversion, which drops hooks: gradsurgeon put them on again"
_TAKEN_OFF = "lost its hooks, because other code removed them: gradsurgeon installed them again"
_LOST = (
    "was replaced, renamed, taken out of its module, or tied to another parameter: no rule acts on it any more. Apply the rules "
    "again with replace=True"
)
_CONTAINER = "the module that the rules were applied to is gone, but parts of it live on: keep a reference to it for layers to come"
_OTHER_MODULE = "was replaced by another module: its rules act on the new one from now on"
_NO_MODULE = "is gone from the model, or torch.jit runs it without hooks: rules on it no longer act"
_UNNOTICED = "was replaced or removed: no rule acted on it since then"
_NEW = "matches {count} that came after the rules were applied{examples}, but does not act there: apply it with replace=True"


class ModelChanges:
    """Compares the model with the plan, at known changes and now and then."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        effects: Effects,
        param_hooks: ParamHooks,
        module_hooks: ModuleHooks,
    ) -> None:
        self._model = weakref.ref(model)
        self._context = effects.context
        self._plan = plan
        self._effects = effects
        self._param_hooks = param_hooks
        self._module_hooks = module_hooks
        # The names of modules in the plan, and all other names that were reported.
        self._known = set[str]()
        for module in plan.manifest.modules:
            self._known.update(module.names)
        # Whether a module got something new, so new names are to be reported after the next update.
        self._grown = False
        self._modules = weakref.WeakSet(model.modules())
        self._swapped: set[int] = set()
        # The parameters that no rule acts on any more.
        self._lost: set[int] = set()
        # Whether an update was seen. Until then, a script may load, tie or shard the parameters of its model.
        self._begun = False
        self._lock = effects.context.parameters.lock
        self._over = False

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the model, or the modules that outlived it."""
        model = self._model()
        if model is None:
            return list(self._modules)
        return list(model.modules())

    def params(self) -> Sequence[Tensor]:
        """Return the parameters of the model, or the parameters that outlived it."""
        model = self._model()
        if model is not None:
            return list(model.parameters())
        return self._context.parameters.present()

    def let_go(self) -> None:
        """Stop all checks: the session is about to remove its rules from the model."""
        with self._lock:
            self._over = True

    def check(self) -> None:
        model = self._model()
        if model is not None:
            plan = bind(self._plan.rules, from_model(model), alone=False, lenient=True)
            self._context.refusals.refuse_complaints(plan.refused)

    def swapped(self, params: Sequence[Tensor]) -> None:
        indices = self._context.parameters.owned(params)
        for index in indices:
            if self._param_hooks.revive(index):
                self._swapped.add(index)

    def after_step(self, counter: StepCounter) -> None:
        self._begun = True
        if self._model() is None:
            self._context.event_log.notice_once("container", _CONTAINER, warn=True)
        if self._grown:
            self._grown = False
            self.compare()
        always_acts = self._effects.any_always
        if not always_acts and self._effects.rests(counter.step + 1):
            return
        # `OptimizerWatch` calls `rearm` before each step of an optimizer, unless its rules rest.
        is_common = counter is self._context.counters.common
        if is_common or (not always_acts and self._effects.rests(counter.step)):
            self.rearm()
        hooks = self._param_hooks
        rearmed = [index for index in hooks.taken_off() if hooks.rearm(index)]
        if rearmed:
            self._emit("hook-rearmed", self._context.names_of(rearmed), _TAKEN_OFF)

    def before_forward(self) -> None:
        self._grown = True
        for param in self._context.parameters.params():
            # Between passes, a sharded model has other parameters than at a step.
            if param is not None and _dist.is_sharded(param):
                return
        # New names are not reported yet: the script or the launcher may still apply rules to them.
        self.compare(new=False)
        self.rearm()

    def knows(self, module: nn.Module) -> bool:
        return module in self._modules

    def rearm(self) -> None:
        """Report parameters that got new content, and parameters that were replaced."""
        with self._lock:
            if self._over:
                return
            swapped = sorted(self._swapped)
            self._swapped = set()
            self._emit("hook-rearmed", self._context.names_of(swapped), _SWAPPED)
            replaced = self._context.parameters.replaced()
            if not replaced:
                return
            if self._model() is None:
                self._lose(replaced, warn=True)
            else:
                self.compare()

    def compare(self, *, closing: bool = False, new: bool = True) -> None:
        """Find the parameters and modules of the plan in the model, and report changes; without warnings if it is ``closing``."""
        with self._lock:
            model = self._model()
            if model is None or self._over:
                return
            self._modules = weakref.WeakSet(model.modules())
            if not self._begun and not closing:
                self._take_current(model)
            names = self._compare_params(model, warn=not closing)
            modules = named_modules(model)
            gone: list[str] = []
            others: list[str] = []
            for name, has_rules in self._module_hooks.refresh(modules):
                names_of_kind = others if has_rules else gone
                names_of_kind.append(name)
            if closing:
                self._emit("hook-lost", others + gone, _UNNOTICED, noun="module ", warn=False)
            else:
                self._emit("hook-rearmed", others, _OTHER_MODULE, noun="module ")
                self._emit("hook-lost", gone, _NO_MODULE, noun="module ")
            unknown = names.union(modules) - self._known
            if new and unknown:
                self._emit_new_names(model, unknown, warn=not closing)

    def _take_current(self, model: nn.Module) -> None:
        self._context.parameters.look_up(model)
        self._param_hooks.arm()
        self._context.ranks.look_again()
        self.check()  # rules that cannot act on shards are refused

    def _compare_params(self, model: nn.Module, *, warn: bool) -> set[str]:
        """Drop parameters that are no longer in their places; return the names of parameters without rules."""
        parameters = self._context.parameters
        indices = parameters.tensor_at()
        present: dict[int, int] = {}
        others: dict[str, int] = {}
        for slot in slots(model):
            table = slot.owner._parameters  # noqa: SLF001 # where modules keep them
            param = id(table[slot.key])
            # A wrapper around a module gives its parameters other names, and leaves them where they are.
            index = indices.get((id(table), slot.key))
            if index is None:
                others[slot.name] = param
            else:
                present[index] = param
        gone = set(indices.values()).difference(present, self._lost)
        self._lose(sorted(gone.union(parameters.replaced())), warn=warn)
        known = set(present.values())
        new = {name for name, param in others.items() if param not in known}
        return new.difference(self._context.names)

    def _lose(self, indices: Sequence[int], *, warn: bool) -> None:
        """Stop acting on these parameters, and report the ones that have rules."""
        self._lost.update(indices)
        self._context.parameters.drop(indices)
        for index in indices:
            self._param_hooks.rearm(index)  # takes its hooks off
        with_rules = set(self._effects.armed)
        lost = [index for index in indices if index in with_rules]
        self._emit("hook-lost", self._context.names_of(lost), _LOST, warn=warn)

    def _emit_new_names(self, model: nn.Module, unknown: set[str], *, warn: bool) -> None:
        indexes = name_indexes(from_model(model))
        for rule in self._plan.rules.rules:
            if rule.target not in indexes or not self._plan.of(rule.id):
                continue
            index = indexes[rule.target]
            gained = [thing for thing in index.select(rule) if unknown.issuperset(thing.names)]
            if gained:
                noun = index.noun if len(gained) == 1 else f"{index.noun}s"
                text = _NEW.format(count=f"{len(gained)} {noun}", examples=examples(gained))
                self._context.event_log.emit("notice", text, rule=rule.id, warn=warn)
        self._known |= unknown

    def _emit(
        self, kind: EventKind, names: Sequence[str], text: str, *, noun: str = "", warn: bool = True
    ) -> None:
        """Emit an event for every name, and one warning for all names: a conversion changes many parameters."""
        if not names:
            return
        event_log = self._context.event_log
        for name in names:
            event_log.emit(kind, f"{noun}{printable(name)} {text}", name=name)
        if warn:
            each = ": each" if len(names) > 1 else ""
            event_log.warn(f"{noun}{shorten_names(names)}{each} {text}")
