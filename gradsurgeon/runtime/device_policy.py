"""Who decides on an update: the device, by a flag that fused optimizers of torch obey, or the host, which waits for it."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, filterfalse
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from gradsurgeon.actions import TrapRule
from gradsurgeon.distributed import data_parallel
from gradsurgeon.language.planning import Plan
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Due
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.optimizers import first_with_gradient
from gradsurgeon.runtime.passes import PassHistory
from gradsurgeon.runtime.running_steps import RunningStep, callers
from gradsurgeon.runtime.trap_effects import Trap
from gradsurgeon.tensors import _dist

# The kinds of devices whose fused kernels are known to obey the flag.
DEVICES = {"cuda"}
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_COMPILER = str(Path("torch", "_dynamo", "eval_frame.py"))
_OPTIMIZERS = (SGD, Adam, AdamW, Adagrad)


WAITS = "waits once per step: "
# A reason for one step alone.
MAKES_STATE = "the optimizer makes its state in this step"
_OBSERVES = "the session only observes"
_NO_FUSED = "a group of the optimizer has no `fused=True`; `fused=True` avoids it"
_WARNS = "`then: warn` needs the answer before the update; `then: skip-step` avoids it"
_BY_DEVICE = "decided on the device: the host reads the decision before the next update"
_IF_FUSED = (
    "decided on the device if SGD, Adam, AdamW or Adagrad of torch is the optimizer, with `fused=True`; else the host waits once "
    "per step"
)
_IF_AVERAGED = "; among several ranks, if one DistributedDataParallel averages all parameters of the rule, else the host waits once per step"


def with_decisions(plan: Plan, context: Context, optimizers: Sequence[Optimizer] | None) -> Plan:
    """Return a plan that says of each trap on a device whether the host waits for it."""
    texts = dict(plan.rule_warnings)
    params = context.parameters.present()
    if not any(param.device.type in DEVICES for param in params):
        return plan
    for rule in plan.rules.rules:
        if (
            isinstance(rule, TrapRule)
            and rule.target == "params"
            and not rule.edits
            and plan.of(rule.id)
        ):
            texts[rule.id] = (*texts.get(rule.id, ()), _planned(rule, context, optimizers))
    return replace(plan, rule_warnings=texts)


def _planned(rule: TrapRule, context: Context, optimizers: Sequence[Optimizer] | None) -> str:
    reasons: list[str] = []
    if rule.then == "warn":
        reasons.append(_WARNS)
    if not context.acts:
        reasons.append(_OBSERVES)
    for optimizer in optimizers or ():
        reasons += _reasons_of_optimizer(optimizer)
    if reasons:
        return WAITS + reasons[0]
    text = _BY_DEVICE if optimizers else _IF_FUSED
    if _dist.world() > 1:
        text += _IF_AVERAGED
    return text


def is_on_device(optimizer: Optimizer) -> bool:
    """Return whether a device of an optimizer's parameters could decide."""
    param = first_with_gradient(optimizer)
    return param is not None and param.device.type in DEVICES


def reason_to_wait(
    optimizer: Optimizer, update: RunningStep, effects: Effects, history: PassHistory
) -> str:
    """Return why the host decides on an update, empty if the device does."""
    reasons = chain(
        _reasons_of_rules(update.due, effects),
        _reasons_of_ranks(update, effects, history),
        _reasons_of_optimizer(optimizer),
        _reasons_of_step(update),
        _reasons_of_owner(update.due, effects),
        _reasons_of_params(optimizer, effects.context.parameters.params(update.due.hidden_by)),
    )
    return next(reasons, "")


def _reasons_of_rules(due: Due, effects: Effects) -> Iterator[str]:
    context = effects.context
    if not context.acts or context.paused:
        yield _OBSERVES
    if effects.tensor_traps:
        yield f"rule {effects.tensor_traps[0].rule.id} is on modules or tags"
    if due.judges_edits:
        yield "a rule at `step` can make a finite gradient non-finite"
    for bound in due.bound:
        effect = bound.effect
        why = ""
        if isinstance(effect, Trap) and not effect.edits:
            if not effect.decides:
                why = _WARNS
            elif not effect.defers:
                why = "its numbers are no flag on the device"
        elif effect.asks_host:
            why = "it needs to know whether the update takes place"
        if why:
            yield f"rule {bound.rule.id}: {why}"


def _reasons_of_ranks(update: RunningStep, effects: Effects, history: PassHistory) -> Iterator[str]:
    """Yield why ranks may see different gradients; not if one wrapper has averaged them in the last pass."""
    if not effects.context.ranks.are_several:
        return
    passes = history.feeding(update.counter)
    if not passes:
        yield "no backward pass that ranks take together feeds the update"
        return
    last = passes[-1]
    judged: set[int] = set()
    for bound in update.due.judges:
        judged.update(bound.indices)
    # A wrapper leaves alone what the pass has not reached: it may be of an earlier pass, or assigned by the script.
    having, _ = effects.context.parameters.grads(sorted(judged))
    if not set(having).issubset(last.done.indices):
        yield "the last backward pass may not have averaged all gradients"
    if getattr(update.optimizer(), "found_inf", None) is not None:
        # A `GradScaler` looks at all gradients of its optimizer.
        judged.update(update.counter.indices)
    for wrapper in last.done.averaging:
        if data_parallel.averages_plainly(wrapper) and judged <= last.averaged_by(wrapper):
            return
    yield "no single DistributedDataParallel has averaged all gradients in the last backward pass"


def _reasons_of_owner(due: Due, effects: Effects) -> Iterator[str]:
    for bound in due.judges:
        others = set(bound.effect.indices).difference(bound.indices)
        params = effects.context.parameters.present(sorted(others))
        if any(param.requires_grad for param in params):
            yield f"no single optimizer owns all parameters of rule {bound.rule.id}"


def _reasons_of_optimizer(optimizer: Optimizer) -> Iterator[str]:
    if _undecorated(type(optimizer).step) not in _STEPS:
        yield f"the step of {type(optimizer).__name__} is none of torch's own"
    if any(group.get("fused") is not True for group in optimizer.param_groups):
        yield _NO_FUSED


def _reasons_of_step(update: RunningStep) -> Iterator[str]:
    if update.inside or update.has_moved:
        yield "the optimizer steps inside backward, or evaluates its closure again"
    if _may_be_compiled(update.frame):
        yield "the step is compiled"


def _reasons_of_params(optimizer: Optimizer, hidden: Sequence[Tensor | None]) -> Iterator[str]:
    # The optimizer makes no state for what a rule hides from it.
    out = set(map(id, hidden))
    device = None
    lacks_state = False
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None or id(param) in out:
                continue
            device = device or param.device
            if param.device.type not in DEVICES or param.device != device:
                yield f"a parameter is on {param.device}"
            if _dist.is_sharded(param) or param.grad.layout is not torch.strided:
                yield "a parameter is divided over ranks, or has a sparse gradient"
            lacks_state = lacks_state or _lacks_state(optimizer, group, param)
    if device is None:
        yield "no parameter has a gradient"
    if lacks_state:
        # The next update may do without a wait, so this is the least reason.
        yield MAKES_STATE


def _lacks_state(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> bool:
    """Return whether the optimizer keeps something for a parameter, and has not made it yet."""
    state = optimizer.state.get(param, {})
    if isinstance(optimizer, SGD):
        # A skipped first step would leave the buffer without numbers.
        return bool(group["momentum"]) and state.get("momentum_buffer") is None
    return not state


def _may_be_compiled(frame: FrameType | None) -> bool:
    """Return whether the compiler may run a frame: it is called from a compiled function, or from one left uncompiled."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(caller.f_code.co_filename.endswith(_COMPILER) for caller in callers(frame))


def _undecorated(step: Any) -> Any:
    """Return a method without the decorators of torch; those of others may do anything."""
    return inspect.unwrap(step, stop=_is_foreign)


def _is_foreign(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return not getattr(code, "co_filename", "").startswith(_TORCH)


# Some of these classes share one method.
_STEPS = frozenset(filterfalse(_is_foreign, [_undecorated(kind.step) for kind in _OPTIMIZERS]))
