"""Makes the effect of each rule."""

from gradsurgeon.actions import (
    ByNorm,
    CaptureRule,
    EditRule,
    FreezeRule,
    ObserverRule,
    Rule,
    TrapRule,
)
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.editing_effects import CutSpikes, ElementEdit, Hide, NormEdit
from gradsurgeon.runtime.effect import Effect, Effects
from gradsurgeon.runtime.observing_effects import Copy, FlagNonfinite, Record
from gradsurgeon.runtime.spike_traps import SpikeTraps


def effects_of(context: Context, spikes: SpikeTraps) -> Effects:
    return {rule.id: _effect_of(rule, context, spikes) for rule in context.rules}


def _effect_of(rule: Rule, context: Context, spikes: SpikeTraps) -> Effect:
    effect = Effect(rule, context)
    if isinstance(rule, EditRule):
        edit = context.edits[rule.id]
        if isinstance(edit, ByNorm):
            effect = NormEdit(rule, context, edit)
        else:
            effect = ElementEdit(rule, context, edit)
    elif isinstance(rule, CaptureRule):
        effect = Copy(rule, context)
    elif isinstance(rule, ObserverRule):
        effect = Record(rule, context)
    elif isinstance(rule, FreezeRule):
        effect = Hide(rule, context)
    elif isinstance(rule, TrapRule) and rule.target != "params":
        effect = FlagNonfinite(rule, context)
    elif isinstance(rule, TrapRule) and rule.edits:
        effect = CutSpikes(rule, context, spikes)
    # Checks, rules on losses, and traps that only judge do nothing with tensors as they come.
    return effect
