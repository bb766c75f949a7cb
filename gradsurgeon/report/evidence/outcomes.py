"""What each action would do to gradients of which the norms are known. Needs numpy; `spike-trap` also needs torch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradsurgeon.actions import Rule
from gradsurgeon.actions._ramps import fixed
from gradsurgeon.actions.clamp import Clamp
from gradsurgeon.actions.clip_norm import ClipNorm
from gradsurgeon.actions.freeze import Freeze
from gradsurgeon.actions.nan_trap import NanTrap
from gradsurgeon.actions.scale import Scale
from gradsurgeon.actions.spike_trap import SpikeTrap
from gradsurgeon.actions.zero import Zero
from gradsurgeon.common._grouping import grouped
from gradsurgeon.common._libraries import is_installed
from gradsurgeon.report.evidence.gradients import MatchedGradients, TrialOutcome
from gradsurgeon.report.evidence.run_norms import Array
from gradsurgeon.report.evidence.told import ALL

# The actions with a bound. A `spike-trap` holds gradients to it under `then: clip` alone.
BOUNDING = (ClipNorm, Clamp, SpikeTrap)

_UNITS = "the norms of single units are not recorded"
_BOUNDS = "records tell of bounds that are alike on both sides, and these are not"
_TORCH = "the bounds of `spike-trap` are computed by torch, which is not installed here"


def untold(rule: Rule, *, is_open: bool = False) -> str:
    """Return why no records tell what a rule does; empty if some do. Both bounds of a rule may be open."""
    if isinstance(rule, ClipNorm) and rule.per == "unit":
        return _UNITS
    if isinstance(rule, Clamp) and not (is_open and rule.min == rule.max) and not _is_even(rule):
        return _BOUNDS
    if isinstance(rule, SpikeTrap) and not is_installed("torch"):
        return _TORCH
    if type(rule) not in OUTCOMES:
        return f"norms do not show what `{rule.action}` does"
    return ""


def _is_even(rule: Clamp) -> bool:
    return isinstance(rule.max, float) and rule.min == -rule.max


def stats_of(rule: Rule) -> tuple[str, ...]:
    """Return the statistics that a rule needs; it compares the last one with its bound."""
    if isinstance(rule, Clamp) or getattr(rule, "norm_type", 2) == "inf":
        return ("l2", "linf")
    return ("l2",)


def _nan_trap(_rule: NanTrap, gradients: MatchedGradients) -> TrialOutcome:
    return TrialOutcome(gradients.due & ~np.isfinite(gradients.norms))


def _freeze(_rule: Freeze, gradients: MatchedGradients) -> TrialOutcome:
    return TrialOutcome(gradients.due)


def _zero(_rule: Zero, gradients: MatchedGradients) -> TrialOutcome:
    factors = np.where(gradients.due, np.float32(0), np.float32(1))
    return TrialOutcome(gradients.due & (gradients.norms != 0), factors=factors)


def _scale(rule: Scale, gradients: MatchedGradients) -> TrialOutcome:
    factors = np.where(gradients.due, gradients.number(rule, "factor"), np.float32(1))
    changed = (factors != 1) & (gradients.norms != 0)
    nonfinite = ~np.isfinite(gradients.norms)
    # NaN times 0 is NaN.
    factors = np.where(nonfinite & (factors == 0), np.float32(np.nan), factors)
    # A factor changes finite elements alone, and whether there are some beside a NaN is unknown.
    return TrialOutcome(changed, factors=factors, unknown=changed & nonfinite)


def _clip_norm(rule: ClipNorm, gradients: MatchedGradients) -> TrialOutcome:
    due = gradients.due
    bound = gradients.number(rule, "max_norm")
    stat = stats_of(rule)[-1]
    values = np.where(due, gradients.stats[stat], 0).astype(float)
    order = np.inf if stat == "linf" else 2
    norms = np.zeros(due.shape, np.float32)
    compared = {}
    for group, columns in _groups(rule, gradients.names).items():
        joined = np.linalg.norm(values[:, columns], order, axis=1).astype(np.float32)
        norms[:, columns] = joined[:, None]
        compared[group] = np.where(due[:, columns].any(axis=1), joined, np.nan)
    factors = np.where(due, _clip_factor(norms, bound), np.float32(1))
    with np.errstate(all="ignore"):
        strength = np.maximum(norms / bound, 1)
    return TrialOutcome(factors < 1, strength, factors, compared=compared, acts_at=_clips)


def _clip_factor(norms: Array, bound: Array | np.float32) -> Array:
    """Return the factors of a clip, 1 where it changes nothing, float32 as the norms."""
    with np.errstate(all="ignore"):
        # Torch divides a number by a tensor in this way.
        factors = np.reciprocal(norms + np.float32(1e-6)) * bound
    return np.where((norms < np.inf) & (factors < 1), factors, np.float32(1))


def _clips(norms: Array, bound: float) -> Array:
    return _clip_factor(norms.astype(np.float32), np.float32(bound)) < 1


def _groups(rule: ClipNorm, names: Sequence[str]) -> dict[str, list[int]]:
    """Return the columns of the gradients that share a norm, by what they are called together."""
    if rule.per == "rule":
        return {ALL: list(range(len(names)))}
    if not rule.joins_norms:
        return {name: [column] for column, name in enumerate(names)}
    return grouped(range(len(names)), lambda column: rule.group_of(names[column]))


def _clamp(rule: Clamp, gradients: MatchedGradients) -> TrialOutcome:
    largest = gradients.stats["linf"]
    bound = np.float32(fixed(rule.max or 0.0))
    # Beside a NaN the largest element is unknown, and some element may be beyond the bound.
    acted = gradients.due & ~(largest <= bound)
    unknown = acted & np.isnan(largest)
    known = gradients.due & ~np.isnan(largest)
    compared = zip(gradients.names, np.where(known, largest, np.nan).T, strict=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return TrialOutcome(acted, largest / bound, None, unknown, dict(compared))


def _spike_trap(rule: SpikeTrap, gradients: MatchedGradients) -> TrialOutcome:
    """Let the bound learn from recorded norms as it learns in a training, by the same code."""
    import torch  # noqa: PLC0415 # only here

    judged = gradients.due
    names = [ALL] if rule.joins_norms else gradients.names
    # A gradient that is not judged counts as NaN, from which no bound learns.
    values = torch.from_numpy(np.where(judged, gradients.norms, np.nan).astype(float))
    before = values.new_full((len(values), len(names)), torch.nan)
    passed = before.clone()
    bound = rule.above.bound()
    kept = values.new_zeros(bound.rows, len(names))
    for row in np.flatnonzero(judged.any(axis=1)).tolist():
        norms = values[row]
        if rule.joins_norms:
            norms = torch.linalg.vector_norm(norms[torch.from_numpy(judged[row])], keepdim=True)
        before[row] = norms
        passed[row], kept = bound.advance(kept, norms)
    is_over = passed < before
    strength = (before / passed).where(is_over, 1.0).numpy()
    compared = {}
    # No single number says how often a bound that follows the norms would act.
    if rule.above.norm is not None:
        has_norm = judged.any(axis=1, keepdims=True) if rule.joins_norms else judged
        # A NaN is as large as any.
        is_nan = has_norm & before.isnan().numpy()
        norms_before = np.where(is_nan, np.inf, before)
        compared = dict(zip(names, norms_before.T, strict=True))
    if not rule.edits:
        objects = judged & (is_over | ~before.isfinite()).numpy()
        return TrialOutcome(objects, strength, compared=compared)
    acted = judged & is_over.numpy()
    factors = np.where(acted, (passed / before).numpy(), 1).astype(np.float32)
    return TrialOutcome(acted, strength, factors, compared=compared, acts_at=_cuts)


def _cuts(norms: Array, bound: float) -> Array:
    # A norm that is not finite is left alone.
    return (norms > bound) & (norms < np.inf)


OUTCOMES: dict[type[Rule], Callable[[Any, MatchedGradients], TrialOutcome]] = {
    NanTrap: _nan_trap,
    Freeze: _freeze,
    Zero: _zero,
    Scale: _scale,
    ClipNorm: _clip_norm,
    Clamp: _clamp,
    SpikeTrap: _spike_trap,
}
