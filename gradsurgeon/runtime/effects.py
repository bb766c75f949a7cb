"""All effects of a session, and which of them are due in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gradsurgeon.actions import Rule, Steps
from gradsurgeon.language.planning import ROOT
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import NOTHING_DUE, Bound, Due, Effect
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.runtime.trap_effects import TensorTrap, Trap
from gradsurgeon.tensors import _torch

_LBFGS = (
    "LBFGS moves all parameters together and several times in a step, so no rule can hide a parameter from it or skip the "
    "step; make requires_grad false in the script, or use `then: raise`"
)
_INSIDE = (
    "an optimizer steps inside backward, parameter by parameter, so at no moment are all gradients there while the "
    "update can still be held back; step the optimizer after backward, or leave the rule out"
)


class Effects:
    """All effects of a session, in the order in which they act."""

    def __init__(
        self,
        context: Context,
        effects: Sequence[Effect],
        modules: Mapping[str, Sequence[Effect]],
        tags: Sequence[Effect],
    ) -> None:
        self.context = context
        self.all = effects
        # By module, in the order of the model.
        self.modules = modules
        self.tags = tags
        self._on_params: list[Effect] = []
        # The steps of the effects on parameters that do not act in every step.
        self._schedules: list[Steps] = []
        for effect in effects:
            steps = effect.rule.steps
            if effect.indices:
                self._on_params.append(effect)
                if not steps.always:
                    self._schedules.append(steps)
        # The effects on modules and tags, with the module whose optimizer counts their steps.
        self.sites: dict[Effect, str] = {}
        for name, on_module in modules.items():
            for effect in on_module:
                self.sites.setdefault(effect, name)
        self.sites.update(dict.fromkeys(tags, ROOT))
        self.tensor_traps = [effect for effect in self.sites if isinstance(effect, TensorTrap)]
        # Whether an effect on parameters acts in every step.
        self.any_always = len(self._schedules) < len(self._on_params)
        self._bound: dict[StepCounter, list[Bound]] = {}
        self._due: dict[tuple[StepCounter, int, tuple[bool, ...]], Due] = {}
        # The version of the counters for which these hold.
        self._version = -1

    @property
    def judging(self) -> list[Effect]:
        """The effects that judge gradients after backward passes."""
        return [effect for effect in self.on_params("accumulated") if effect.judges]

    @property
    def traps(self) -> list[Trap]:
        return [effect for effect in self.all if isinstance(effect, Trap)]

    def on_params(self, *moments: str) -> list[Effect]:
        """Return the effects on parameters that act at some moments."""
        return [effect for effect in self._on_params if effect.moment in moments]

    @property
    def armed(self) -> Sequence[int]:
        """The parameters whose gradients matter to an effect."""
        indices: set[int] = set()
        for effect in self._on_params:
            if effect.moment != "updated":
                indices.update(effect.indices)
        return sorted(indices)

    @property
    def watched(self) -> Sequence[int]:
        # Without any, their optimizer still counts the steps.
        return self.armed or range(len(self.context.names))

    def due(self, counter: StepCounter) -> Due:
        """Return the effects that are due for a counter in its next update; none in a pause."""
        context = self.context
        refusals = context.refusals
        # Equals `paused`, without a call: hooks ask this several times in each step.
        if context.is_paused or refusals.over or (refusals.lenient and _torch.is_capturing()):
            return NOTHING_DUE
        if self._version != context.counters.version:
            self._version = context.counters.version
            self._bound.clear()
            self._due.clear()
        in_steps: tuple[bool, ...] = ()
        if self._schedules:
            in_steps = tuple([steps.includes(counter.step) for steps in self._schedules])
        key = counter, len(refusals.resting), in_steps
        if key not in self._due:
            step = counter.step
            bound = self._bound_to(counter)
            self._due[key] = Due([each for each in bound if refusals.lets_act(each.rule, step)])
        return self._due[key]

    def _bound_to(self, counter: StepCounter) -> list[Bound]:
        if counter not in self._bound:
            bindings = []
            for effect in self._on_params:
                bound = effect.bound_to(counter)
                if bound.indices:
                    bindings.append(bound)
            self._bound[counter] = bindings
        return self._bound[counter]

    def rests(self, step: int) -> bool:
        """Return whether no effect can act at a step, so callers can skip the search for changed parameters."""
        if self.any_always or self.sites:
            return False
        return not any(steps.includes(step) for steps in self._schedules)

    def let_skips_warn(self, why: str) -> None:
        """Make the traps of a pack that skip updates only warn from now on. Chosen traps stay as they are."""
        refusals = self.context.refusals
        if not refusals.lenient:
            return
        softened = []
        for trap in self.traps:
            if trap.then == "skip-step":
                trap.soften()
                softened.append(trap.rule.id)
        if softened:
            refusals.soften_skips(softened, why)

    def refuse_under_lbfgs(self, indices: Iterable[int]) -> None:
        """Refuse effects on some parameters that hide gradients or skip updates."""
        self.let_skips_warn(_LBFGS)
        refused = []
        for effect in self._at_updates(indices):
            skips = effect.then == "skip-step"
            if effect.holds or skips:
                refused.append(effect.rule.id)
        self.context.refusals.refuse_rules(refused, _LBFGS)

    def refuse_inside_backward(self, indices: Iterable[int]) -> None:
        """Refuse effects on some parameters that need all gradients while the update can still be held back."""
        refused = []
        for effect in self._at_updates(indices):
            objects = effect.judges and not effect.edits
            if objects or effect.hides or effect.rule.joins_norms:
                refused.append(effect.rule.id)
        self.context.refusals.refuse_rules(refused, _INSIDE)

    def _at_updates(self, indices: Iterable[int]) -> list[Effect]:
        wanted = set(indices)
        on_params = self.on_params("accumulated", "step")
        own = [effect for effect in on_params if not wanted.isdisjoint(effect.indices)]
        return [*own, *self.tensor_traps]

    @property
    def before_scaler(self) -> list[Rule]:
        """The rules that act before a `GradScaler` looks for its overflow."""
        return [effect.rule for effect in (*self.on_params("backward"), *self.sites)]

    def conclude(self) -> None:
        """Ask checks to report their findings so far. More may come."""
        for effect in self._on_params:
            effect.at_end()

    def close(self) -> None:
        for effect in self.all:
            effect.close()


def by_parameter(effects: Iterable[Effect]) -> dict[int, list[Effect]]:
    by_index: dict[int, list[Effect]] = {}
    for effect in effects:
        for index in effect.indices:
            by_index.setdefault(index, []).append(effect)
    return by_index
