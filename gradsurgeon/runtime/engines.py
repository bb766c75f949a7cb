"""What an engine of DeepSpeed changes for the rules: it keeps gradients, and float32 copies of weights, apart from the model."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from gradsurgeon.distributed.deepspeed_engine import UPDATE, Engine, EngineWatch
from gradsurgeon.language.planning import ENGINE_NOTE
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.controller import Controller
from gradsurgeon.runtime.effect import Effect
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.step_counters import StepCounter

_ENGINE = "DeepSpeed updates the weights itself, from gradients that it keeps"
_NO_FREEZE = (
    f"{_ENGINE}, so no rule can hide one: set requires_grad to False before `deepspeed.initialize`"
)
_NO_SKIP = (
    f"{_ENGINE}, so no rule can skip its update: use `then: warn` or `then: raise`, and in the configuration of DeepSpeed "
    "`check_grad_overflow`, which skips updates with gradients that are not finite"
)
_NO_NORM = (
    f"{_ENGINE} in parts on all ranks, and a rule asks no other rank for its part: use `gradient_clipping` in the "
    "configuration of DeepSpeed"
)
_NO_EDIT = (
    f"{_ENGINE}: use `at: backward`, or `deepspeed.utils.safe_set_full_grad` before `engine.step()`"
)
_NO_WEIGHT = f"{_ENGINE}, and keeps float32 copies and states apart: use `deepspeed.utils.safe_get_full_fp32_param` and its like"
_NO_COPY = f"{_ENGINE}: use `deepspeed.utils.safe_get_full_grad` before `engine.step()`"

_BLIND = (
    f"this version of DeepSpeed has no `DeepSpeedEngine.{UPDATE}`, by which rules see its updates: they see what optimizers of "
    "torch do, and no gradients that the engine keeps"
)


class Engines:
    """Shows the engines of DeepSpeed to sessions, before their updates too."""

    def __init__(self, controllers: Callable[[], Sequence[Controller]]) -> None:
        self._controllers = controllers
        self._watch = EngineWatch(self._before_update)
        self.close = self._watch.close

    def meet(self) -> None:
        for engine in self._watch.engines():
            for controller in self._controllers():
                with controller.context.refusals:
                    _meet(controller, engine)
        if self._watch.is_blind:
            for controller in self._controllers():
                context = controller.context
                context.event_log.notice_once("engine", _BLIND)

    def _before_update(self, engine: Engine) -> None:
        for controller in self._controllers():
            with controller.context.refusals:
                counter = _meet(controller, engine)
                if counter is not None:
                    scale = getattr(engine.optimizer, "grad_scale", None)
                    controller.show_collected(counter, scale)


def _meet(controller: Controller, engine: Engine) -> StepCounter | None:
    """Take gradients and weights from an engine from now on, if it updates the model; return the counter of its updates."""
    context = controller.context
    owner = controller.steps.meet(engine.optimizer)
    if owner is None:
        return None
    if context.parameters.elsewhere is not engine:
        if engine.may_leave_out:
            _refuse(context, controller.effects, engine)
        context.parameters.elsewhere = engine
        context.event_log.notice_once("engine", ENGINE_NOTE)
        context.ranks.look_again()
    return owner.counter


def _refuse(context: Context, effects: Effects, engine: Engine) -> None:
    """Refuse rules that cannot act under an engine. Traps of a pack only warn instead of skipping."""
    effects.let_skips_warn(_NO_SKIP)
    refused = defaultdict(list)
    on_params = effects.on_params("accumulated", "step", "updated")
    for effect in dict.fromkeys([*on_params, *effects.traps]):
        why = next(_obstacles(effect, engine), "")
        if why:
            refused[why].append(effect.rule.id)
    for why, rules in refused.items():
        context.refusals.refuse_rules(rules, why)


def _obstacles(effect: Effect, engine: Engine) -> Iterator[str]:
    """Yield why a rule cannot act under an engine."""
    if effect.hides or effect.holds:
        yield _NO_FREEZE
    if effect.then == "skip-step":
        yield _NO_SKIP
    if not engine.is_divided:
        return
    if effect.measures:
        yield _NO_NORM
    if effect.moment == "updated" and (effect.edits or effect.rule.ref.side == "state"):
        yield _NO_WEIGHT
    if effect.edits:
        yield _NO_EDIT
    if effect.takes_any:
        yield _NO_COPY
