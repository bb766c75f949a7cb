"""What has become of the model since the rules were bound: names that moved, left or came.

The rules stay bound to the names that the plan has. Whatever else the model has by now is said, with
the remedy: a session that bound itself anew would do what nobody has read in a plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gradsurgeon import _dist
from gradsurgeon.errors import printable
from gradsurgeon.events import EventKind
from gradsurgeon.planning import Plan, bind, from_model, named_modules, slots
from gradsurgeon.planning.matching import NameIndex, examples
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.hook_registry import HookRegistry
from gradsurgeon.runtime.module_hooks import ModuleHooks
from gradsurgeon.runtime.notices import shorten_names
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.training_events import BackwardPass

# A walk over the model is too much for every step. The first one comes when a rule that has not fired
# is mentioned as well; later ones ever more seldom, so that they cost nothing in the long run.
_FIRST_LOOK = 3

Place = tuple[dict[str, Any], str]


class ModelChanges:
    """Compares the model with the plan, whenever there is reason to, and now and then.

    Hooks that got lost are noticed once per step, brought back, and said.

    Args:
        model: reached weakly.
        context: what rules may use while they act.
        plan: what the rules were bound to.
        param_hooks: the hooks on parameters.
        hooks: the hooks on modules.
    """

    def __init__(
        self,
        model: nn.Module,
        context: Context,
        plan: Plan,
        param_hooks: HookRegistry,
        hooks: ModuleHooks,
    ) -> None:
        self._model = weakref.ref(model)
        self._context = context
        self._plan = plan
        self._param_hooks = param_hooks
        self._hooks = hooks
        manifest = plan.manifest
        self._known = {
            "params": {name for param in manifest.params for name in param.names},
            "modules": {name for module in manifest.modules for name in module.names},
        }
        # Names that stand for the parameter of another name.
        self._alias_of = {alias: param.name for param in manifest.params for alias in param.aliases}
        self._tied: dict[int, int] = {}
        self._warned: set[str] = set()
        self._steps = 0
        self._next = _FIRST_LOOK
        # By id: an address that another module has got since only leads to one look more.
        self._modules = set(map(id, model.modules()))
        # The step at which the modules were last known to carry their hooks.
        self._looked = context.counters.latest - 1
        self._arrived: set[int] = set()
        self._unseen: set[int] = set()
        self._swapped: list[int] = []

    def check(self) -> None:
        """Raise where the rules cannot act on the model as it is now.

        Raises:
            BindError: naming the rules.
        """
        if (model := self._model()) is not None:
            bind(self._plan.rules, from_model(model), alone=False)

    def arrived(self, done: BackwardPass) -> None:
        self._arrived.update(done.tensors)
        # A gradient that its hook has not seen came past it.
        hooked = self._context.program.per_tensor
        self._unseen.update(t for t in done.tensors if t in hooked and t not in done.calls)

    def unowned(self) -> list[int]:
        """Return the tensors that get gradients and that no optimizer owns which has stepped so far."""
        return [
            tensor for tensor in self._context.counters.common.tensors if tensor in self._arrived
        ]

    @contextmanager
    def swapping(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Let the content of tensors be swapped, after which no hook on them is called any more."""
        with self._context.parameters.without_references(params) as tensors:
            yield
        self._swapped += [tensor for tensor in tensors if self._param_hooks.revive(tensor)]

    def after_step(self, counter: StepCounter) -> None:
        """Look after the hooks on the tensors of a clock; a step of it is over."""
        self._steps += 1
        if self._steps >= self._next:
            self._next = 2 * self._steps
            self.compare()
        self._tell_swapped()
        self.rearm()
        self._arrived.difference_update(counter.tensors)
        missing = self._param_hooks.missing(sorted(self._unseen))
        self._unseen.clear()
        for tensor in missing:
            self._param_hooks.rearm(tensor)
        text = "has lost its hooks, which somebody has taken off: they were put on anew"
        self._say_of_each("hook-rearmed", missing, lambda name: f"{name} {text}")

    def before_forward(self) -> None:
        """Put hooks on what has been exchanged, before a forward pass goes through it."""
        params = self._context.parameters.params()
        # Between its passes a sharded model has other parameters than when it steps.
        if not any(param is not None and _dist.is_sharded(param) for param in params):
            self.compare(at_once=True)
            self.rearm()
            self._tell_swapped()

    def find_again(self) -> None:
        """Find the parameters of the plan, where there is reason to believe that they moved."""
        if self._model() is not None:
            self.compare()
            self.rearm()

    def knows(self, module: nn.Module) -> bool:
        """Tell whether a module is part of the model, as it was looked at last."""
        return id(module) in self._modules

    def compare(self, *, closing: bool = False, at_once: bool = False) -> None:
        """Find the parameters and modules of the plan in the model as it is now.

        Args:
            at_once: no forward pass has gone through what has come.
            closing: the session ends: say what went unnoticed, and leave it at that.
        """
        model = self._model()
        if model is None:
            return
        self._modules = set(map(id, model.modules()))
        self._follow_params(model, closing=closing)
        for name, there in self._hooks.refresh(named_modules(model)):
            what = "was replaced by another module" if there else "is gone from the model"
            after = f": {self._new_one(at_once)}" if there else ": rules on it no longer act"
            self._say(
                "hook-lost" if closing or not there else "hook-rearmed",
                f"module {printable(name)} {what}{'' if closing else after}",
                name=name,
                warn=not closing,
            )
        if not at_once:
            # The script, or the launcher in its place, may yet bind what has come.
            self._mention_new(model, warn=not closing)
        self._looked = self._context.counters.latest

    def _new_one(self, at_once: bool) -> str:  # noqa: FBT001 # the only thing it is told
        """Return from when on the rules act on a module that was replaced since the last look."""
        if at_once:
            return "its rules act on the new one"
        now, missed = self._context.counters.latest, self._looked + 1
        steps = f"step {now}" if missed >= now else f"steps {missed} to {now}"
        return f"its rules act on the new one from now on, and may have missed {steps}"

    def _tell_swapped(self) -> None:
        tensors, self._swapped = sorted(set(self._swapped)), []
        text = "got another content by a conversion, which takes no hooks along: they were installed anew"
        self._say_of_each("hook-rearmed", tensors, lambda name: f"{name} {text}")

    def rearm(self) -> list[int]:
        """Put hooks on the parameters that have taken the place of those that carried them.

        Returns:
            The tensors whose parameter was replaced or is gone.

        Raises:
            BindError: a rule cannot act on what took the place.
        """
        if not self._param_hooks.replaced():
            return []
        self.compare()  # they may have moved
        replaced = self._param_hooks.replaced()
        params = [self._context.parameters.param(tensor) for tensor in replaced]
        if any(one is not None and _dist.is_sharded(one) for one in params):
            self.check()
        there = [tensor for tensor in replaced if self._param_hooks.rearm(tensor)]
        text = "was replaced by another parameter: its hooks were put on the new one"
        self._say_of_each("hook-rearmed", there, lambda name: f"{name} {text}")
        gone = {tensor: self._why_gone(tensor) for tensor in replaced if tensor not in there}
        self._lost(gone)
        return replaced

    def _say_of_each(
        self, kind: EventKind, tensors: Sequence[int], text: Callable[[str], str]
    ) -> None:
        """Note an event for every tensor, and warn once for all: a conversion concerns many."""
        if not tensors:
            return
        names = [self._context.program.names[tensor] for tensor in tensors]
        for name in names:
            step = self._context.counters.latest
            self._context.event_log.emit(kind, text(printable(name)), step=step, name=name)
        self._context.event_log.warn(
            text(f"{shorten_names(names)}: each" if len(names) > 1 else shorten_names(names))
        )

    def _lost(self, gone: Mapping[int, str]) -> None:
        for tensor, text in gone.items():
            name, step = self._context.program.names[tensor], self._context.counters.latest
            self._context.event_log.emit("hook-lost", text, step=step, name=name)
        if gone:
            others = [self._context.program.names[tensor] for tensor in list(gone)[1:]]
            more = f"; so it is with {shorten_names(others)}" if others else ""
            self._context.event_log.warn(next(iter(gone.values())) + more)

    def _why_gone(self, tensor: int) -> str:
        """Return what has become of a parameter that is no longer there under its name."""
        name = printable(self._context.program.names[tensor])
        if tensor in self._tied:
            other = printable(self._context.program.names[self._tied[tensor]])
            return (
                f"{name} was tied to {other} and is the same parameter now: only the rules on {other} act "
                "on it; apply them again to bind both names"
            )
        return (
            f"{name} is gone from its module: rules on it no longer act; apply them again after the model "
            "has its final form"
        )

    def _follow_params(self, model: nn.Module, *, closing: bool) -> None:
        names = {name: tensor for tensor, name in enumerate(self._context.program.names)}
        places: dict[int, Place] = {}
        renamed: dict[int, str] = {}
        moved: dict[int, Place] = {}
        self._tied.clear()
        for slot in slots(model):
            place = (slot.owner._parameters, slot.key)  # noqa: SLF001 # where modules keep them
            param = place[0][place[1]]
            # One that is known has been there before, maybe elsewhere.
            carried = self._context.parameters.tensor_of(param)
            tensor = names.get(slot.name)
            if tensor is None:
                if carried is not None and slot.name not in self._alias_of:
                    renamed.setdefault(carried, slot.name)
                    moved.setdefault(carried, place)
            elif carried in (None, tensor):
                places.setdefault(tensor, place)
            else:
                self._tied[tensor] = carried
        self._find_untied(model, places)
        self._context.parameters.move({**moved, **places})
        self._mention_renamed(
            {i: n for i, n in renamed.items() if i not in places}, closing=closing
        )
        for tensor in self._param_hooks.replaced() if closing else ():
            name = self._context.program.names[tensor]
            text = f"{printable(name)} was replaced or taken out: no rule has acted on it since"
            self._say("hook-lost", text, name=name)

    def _find_untied(self, model: nn.Module, places: Mapping[int, Place]) -> None:
        """Let names that stood for the parameter of another name pass for new ones once they do not."""
        owned = {self._context.program.names[i]: place for i, place in places.items()}
        for slot in slots(model) if self._alias_of else ():
            first = owned.get(self._alias_of.get(slot.name, ""))
            if first and first[0][first[1]] is not slot.owner._parameters[slot.key]:  # noqa: SLF001
                del self._alias_of[slot.name]
                self._known["params"].discard(slot.name)

    def _mention_renamed(self, renamed: Mapping[int, str], *, closing: bool) -> None:
        new = {i: name for i, name in renamed.items() if name not in self._known["params"]}
        if not new:
            return
        self._known["params"].update(new.values())
        first = next(iter(new))
        old = self._context.program.names[first]
        many = len(new) > 1
        text = (
            f"{len(new)} parameter{'s have new names' if many else ' has a new name'} "
            f"({printable(old)} is now {printable(new[first])}{', ...' if many else ''})"
        )
        if not closing:
            text += (
                f": the rules on {'them' if many else 'it'} go on acting, under the old name; one step "
                "may have passed without them. Call gradsurgeon.apply(..., replace=True) to bind them by the names of now"
            )
        self._say("notice" if closing else "hook-rearmed", text, name=old, warn=not closing)

    def _mention_new(self, model: nn.Module, *, warn: bool) -> None:
        """Say which rules would match what has come since."""
        now = {
            "params": {slot.name for slot in slots(model)},
            "modules": set(named_modules(model)),
        }
        new = {kind: names - self._known[kind] for kind, names in now.items()}
        if not any(new.values()):
            return
        manifest = from_model(model)
        found = {
            "params": NameIndex("parameter", manifest.params),
            "modules": NameIndex("module", manifest.modules),
        }
        for rule in self._plan.rules.rules:
            if rule.target in found and new[rule.target] and self._plan.of(rule.id):
                matched = found[rule.target].match(rule)[0]
                gained = [one for one in matched if new[rule.target].issuperset(one.names)]
                self._mention_gained(rule.id, found[rule.target].noun, gained, warn=warn)
        for kind, names in new.items():
            self._known[kind] |= names

    def _mention_gained(self, rule: str, noun: str, gained: Sequence[Any], *, warn: bool) -> None:
        if not gained:
            return
        plural = "s that came" if len(gained) > 1 else " that came"
        text = (
            f"matches {len(gained)} {noun}{plural} after the rules were applied{examples(gained)}, and "
            "does not act there: call gradsurgeon.apply(..., replace=True) once the model has its form"
        )
        self._say("notice", text, rule=rule, warn=warn and rule not in self._warned)
        self._warned.add(rule)

    def _say(
        self, kind: EventKind, text: str, *, rule: str = "", name: str = "", warn: bool = False
    ) -> None:
        step = self._context.counters.latest
        self._context.event_log.emit(kind, text, rule=rule, step=step, name=name, warn=warn)
