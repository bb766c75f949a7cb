"""What rules add to the update alone: the gradients are there, and no backward pass has made them.

Nothing but one look right before the update is measured, which norms, trap and clip share.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from benchmarks import rule_sets
from benchmarks.cases import step_of
from benchmarks.measure import Budget
from benchmarks.overhead import Bare, Row
from benchmarks.workloads import Task, given

GROUP = "step alone"
FULL = Budget(rounds=400, seconds=4.0, least=5)
QUICK = Budget(rounds=60, seconds=0.8, least=5)
TINY, WIDE = "200 tiny tensors", "12 M in 100 tensors"
SHAPES: Mapping[str, tuple[int, int]] = {TINY: (200, 64), WIDE: (100, 120_000)}


def _observing() -> list[rule_sets.RuleDict]:
    return [{"action": "norm-log", "at": "step"}, {"action": "nan-trap"}]


def _clipping(max_norm: float) -> list[rule_sets.RuleDict]:
    clip = {"action": "clip-norm", "per": "rule", "at": "step", "max_norm": max_norm}
    return [*_observing(), clip]


CASES: Mapping[str, Sequence[rule_sets.RuleDict]] = {
    rule_sets.OBSERVE: _observing(),
    rule_sets.CLIP_IDLE: _clipping(1e9),
    rule_sets.CLIP_BITES: _clipping(1e-3),
    rule_sets.IDLE: rule_sets.together()[rule_sets.IDLE],
}


def there(count: int, size: int) -> Callable[[str], Task]:
    """Return a builder of tasks that get copies of ready gradients in the place of a backward pass."""
    build_given = given(count, size)

    def build(device: str) -> Task:
        task = build_given(device)
        params: list[nn.Parameter] = task.params
        grads = [torch.randn(size, device=device) for _ in params]

        def copy() -> None:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()

        return Task(task.model, task.optimizer, copy)

    return build


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per shape and case."""
    for shape in SHAPES:
        for case in CASES:
            yield at(shape, case, device, QUICK if quick else FULL)
            gc.collect()


def at(shape: str, case: str, device: str, budget: Budget) -> Row:
    """Return what the rules of a case add to an update."""
    build = there(*SHAPES[shape])
    bare, task = Bare(build(device), device), build(device)
    with warnings.catch_warnings():
        # Without a backward pass gradsurgeon finds some of this strange, and says so.
        warnings.simplefilter("ignore")
        attached = rule_sets.case(case, CASES[case]).attach(task)
        try:
            found = bare.against(step_of(task, attached), budget)
        finally:
            attached.detach()
    return {"group": GROUP, "workload": shape, "case": case} | found
