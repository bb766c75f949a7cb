"""The running bounds of `spike-trap` in plain numbers, written from the papers, and a loop that keeps to them by hand.

ZClip is arXiv 2504.02507, AdaGC is arXiv 2502.11034. Nothing here knows gradsurgeon.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Bound(Protocol):
    """What has been learnt of one norm.

    Attributes:
        number: how many updates have entered.
        mean: their running mean.
    """

    number: int

    @property
    def mean(self) -> float: ...
    def passes(self, norm: float) -> float: ...
    def learn(self, norm: float) -> None: ...


class ZClip:
    """A norm whose z-score is above a threshold is cut to `mean + sigmas**2 / z * std`."""

    def __init__(self, sigmas: float = 2.5, beta: float = 0.97, warmup: int = 25) -> None:
        self.sigmas, self.beta, self.warmup = sigmas, beta, warmup
        self.first: list[float] = []
        self.number, self.mean, self.variance = 0, 0.0, 0.0

    def passes(self, norm: float) -> float:
        if len(self.first) < self.warmup or not math.isfinite(norm):
            return norm
        std = math.sqrt(self.variance)
        z = (norm - self.mean) / (std + 1e-6)
        return norm if z <= self.sigmas else self.mean + self.sigmas**2 / z * std

    def learn(self, norm: float) -> None:
        if not math.isfinite(norm) or norm == 0:
            return
        self.number += 1
        if len(self.first) < self.warmup:
            self.first.append(norm)
            self.mean = sum(self.first) / len(self.first)
            self.variance = sum((x - self.mean) ** 2 for x in self.first) / len(self.first)
            return
        self.mean = self.beta * self.mean + (1 - self.beta) * norm
        self.variance = self.beta * self.variance + (1 - self.beta) * (norm - self.mean) ** 2


class AdaGC:
    """A norm above so many times the running mean is cut to that."""

    def __init__(self, times: float = 1.05, beta: float = 0.98, warmup: int = 100) -> None:
        self.times, self.beta, self.warmup = times, beta, warmup
        self.number, self.mean = 0, math.inf

    def passes(self, norm: float) -> float:
        if self.number < self.warmup or not math.isfinite(norm):
            return norm
        return min(norm, self.times * self.mean)

    def learn(self, norm: float) -> None:
        if not math.isfinite(norm) or norm == 0:
            return
        if self.number < self.warmup:
            self.mean = min(self.mean, norm)
        else:
            self.mean = self.beta * self.mean + (1 - self.beta) * norm
        self.number += 1


class AutoClip:
    """A norm above a percentile of the last norms, itself among them, is cut to that (Seetharaman et al. 2020)."""

    def __init__(self, percentile: float, window: int = 1000) -> None:
        self.percentile, self.window = percentile, window
        self.history: list[float] = []
        self.number = 0

    @property
    def mean(self) -> float:
        return math.nan  # it has none

    def passes(self, norm: float) -> float:
        if not math.isfinite(norm):
            return norm
        self.number += 1
        self.history = [*self.history, norm][-self.window :]
        if len(self.history) < min(self.window, 100):
            return norm
        return min(norm, float(np.percentile(self.history, self.percentile)))

    def learn(self, norm: float) -> None:
        """Learn nothing: the norm has entered already."""


class Fixed:
    """A norm above a number is cut to that."""

    def __init__(self, norm: float) -> None:
        self.norm = norm
        self.number, self.mean = 0, 0.0

    def passes(self, norm: float) -> float:
        return min(norm, self.norm) if math.isfinite(norm) else norm

    def learn(self, norm: float) -> None:
        self.mean = 0.97 * self.mean + 0.03 * norm if self.number else norm
        self.number += 1


_FORMS: dict[str, Callable[..., Bound]] = {
    "sigmas": ZClip,
    "times": AdaGC,
    "percentile": AutoClip,
    "norm": Fixed,
}


def bound(above: Mapping[str, Any]) -> Bound:
    """Return what an option `above` asks for."""
    return next(made for form, made in _FORMS.items() if form in above)(**above)


class ByHand:
    """What a rule `spike-trap` does to the updates of one optimizer.

    Attributes:
        bounds: by the name of a parameter, or one under no name for all of them.
        cut: how many norms were cut or, where they are not, how many steps had a spike.
    """

    def __init__(
        self, above: Mapping[str, Any], per: str = "rule", then: str = "clip", **_: Any
    ) -> None:
        self._make: Callable[[], Bound] = lambda: bound(above)
        self.per, self.then = per, then
        self.bounds: dict[str, Bound] = {}
        self.cut = 0
        self._passed: dict[str, float] = {}

    def taught_by(self, others: Sequence[ByHand]) -> ByHand:
        """Go on with what others have learnt."""
        for other in others:
            self.bounds.update(copy.deepcopy(other.bounds))
        return self

    def judge(self, grads: Mapping[str, Tensor | None]) -> bool:
        """Clip gradients in place, and return whether the update is to take place.

        Args:
            grads: by the name of the parameter.
        """
        norms = {name: norm_of(grad) for name, grad in grads.items() if grad is not None}
        if self.per == "rule":
            norms = {"": math.sqrt(sum(norm**2 for norm in norms.values()))} if norms else {}
        self._passed = {
            name: self.bounds.setdefault(name, self._make()).passes(norm)
            for name, norm in norms.items()
        }
        cut = [name for name, norm in norms.items() if self._passed[name] < norm]
        if self.then == "clip":
            self.cut += len(cut)
            for name, grad in grads.items():
                key = "" if self.per == "rule" else name
                if grad is not None and key in cut:
                    grad.mul_(self._passed[key] / norms[key])
            return True
        if not cut and all(map(math.isfinite, norms.values())):
            return True
        self.cut += 1
        if self.then == "warn":
            return True
        self._passed = {}
        return False

    def learn(self) -> None:
        """Learn from the update that was judged last: it has taken place."""
        for name, norm in self._passed.items():
            self.bounds[name].learn(norm)
        self._passed = {}


def norm_of(grad: Tensor) -> float:
    """Return the norm of a gradient of any kind, taken in double precision."""
    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
    whole = whole.coalesce().values() if whole.is_sparse else whole
    wide = torch.complex128 if whole.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(whole.detach().to(wide)))


@torch.no_grad()
def clip_updates(params: Sequence[Tensor], before: Sequence[Tensor], most: float, per: str) -> int:
    """Shorten what an update has changed, all together or each by itself; return how many were too long."""
    changes = [param - old for param, old in zip(params, before, strict=True)]
    norms = torch.stack([change.norm() for change in changes])
    if per == "rule":
        norms = norms.norm().expand(len(changes))
    cut = 0
    for param, old, change, norm in zip(params, before, changes, norms, strict=True):
        if norm > most:
            cut += 1
            param.copy_(old + change * (most / norm))
    return cut
