"""Limits that depend on what came before: rounding goes on into later tensors."""

import math
from collections.abc import Sequence

from gradsurgeon.report.comparison.pairs import Pair
from gradsurgeon.report.comparison.tolerance import Tolerance


def carry_on(pairs: Sequence[Pair], rule: Tolerance) -> None:
    """Allow each tensor some times the distance of what came before it, where no noise runs show how far rounding goes.

    Later steps begin with the distance of the weights, and modules with that of their own. A weight goes by its
    gradients, of which an optimizer keeps means, and by itself before the update.
    """
    if rule.kind != "rounding":
        return
    step = pairs[0].step
    largest = 0.0
    modules: dict[str, float] = {}
    params: dict[str, float] = {}
    for pair in pairs:
        if pair.step != step:
            weights = [other for other in pairs if other.step == step and other.base == "value"]
            largest = _of_weights(weights)
            modules = {}
            for weight in weights:
                module = weight.name.rpartition(".")[0]
                modules[module] = max(modules.get(module, 0.0), min(weight.distance, 1.0))
            step = pair.step
        before = largest
        if pair.phase == "update":
            before = params.get(pair.name, 0.0)
        elif pair.phase == "forward":
            before = max(largest, modules.get(pair.name, 0.0))
        pair.tolerance = max(pair.tolerance, rule.times * before)
        # Tensors that have parted allow nothing.
        if pair.is_undecided or pair.is_apart:
            continue
        if pair.phase in ("gradient", "update"):
            params[pair.name] = max(params.get(pair.name, 0.0), pair.distance)
        else:
            largest = max(largest, pair.distance)


def _of_weights(weights: Sequence[Pair]) -> float:
    """Return the distance of all weights together."""
    norms = []
    apart = []
    for pair in weights:
        norm = pair.norm if math.isfinite(pair.norm) else 0.0
        norms.append(norm)
        apart.append(min(pair.distance, 1.0) * norm)
    whole = math.hypot(*norms)
    return math.hypot(*apart) / whole if whole else 0.0
