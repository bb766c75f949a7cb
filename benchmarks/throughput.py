"""What a step costs as trainings run: nothing waits between steps, and the host may run ahead of the device."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from benchmarks import counts, like_for_like, peers, rule_sets
from benchmarks.cases import BARE, Attached, Case, step_of
from benchmarks.measure import Budget, clock, compared, interleave, warm_up
from benchmarks.overhead import Row
from benchmarks.workloads import GPT2, MLP, Task, Workload

GROUP = "throughput"
FULL = Budget(rounds=40, seconds=8.0, least=5)
QUICK = Budget(rounds=10, seconds=1.5, least=5)
# So many steps come between two waits.
STEPS = 8
_PEERS = (peers.CLIP_BITES, "register_hook closures with .item()", "detect_anomaly")
_RULES: Mapping[str, rule_sets.RuleDict] = {
    "norms of all gradients": {"action": "norm-log"},
    "nan-trap, skip-step": {"action": "nan-trap", "then": "skip-step"},
    "clip-norm, per rule": {"action": "clip-norm", "per": "rule", "max_norm": 1e-3},
}


def _cases() -> list[Case]:
    return [
        BARE,
        *(rule_sets.case(title, [rule]) for title, rule in _RULES.items()),
        *(case for case in rule_sets.resting() if case.name == rule_sets.PACK),
        *(rule_sets.case(*modules) for modules in rule_sets.on_modules().items()),
        rule_sets.fingerprint(),
        Case("one isfinite, read by hand", "peer", like_for_like.stop_at_nan),
        *(case for case in peers.cases() if case.name in _PEERS),
    ]


def measured(device: str, *, quick: bool, only: Collection[str] = ()) -> Iterator[Row]:
    """Yield one row per workload, kind of AdamW and case; ``only`` names workloads."""
    for workload in (MLP, GPT2):
        if workload.is_wanted(only, quick=quick):
            for fused, case in product((True, False), _cases()):
                yield _at(workload, case, device, QUICK if quick else FULL, fused=fused)
                gc.collect()


def _at(workload: Workload, case: Case, device: str, budget: Budget, *, fused: bool) -> Row:
    name = f"{workload.name}, AdamW{'(fused=True)' if fused else ''}"
    bare, task = (_with_adamw(workload.build(device), fused=fused) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `overhead`
        attached = case.attach(task)
        lanes = [
            partial(_repeat, step_of(*lane)) for lane in ((bare, Attached()), (task, attached))
        ]
        for _ in range(0, case.rest, STEPS):
            lanes[1]()
        warm_up(lanes, budget.seconds / 4)
        found = compared(*interleave(lanes, clock(device), budget))
        before, most = (counts.peak(lane, device) for lane in lanes)
        attached.detach()
    row = {"group": GROUP, "workload": name, "case": case.name, "kind": case.kind}
    return row | found | {"peak_bytes": most - before}


def _with_adamw(task: Task, *, fused: bool) -> Task:
    return replace(task, optimizer=torch.optim.AdamW(task.params, lr=0.0, fused=fused))


def _repeat(step: Callable[[], None]) -> None:
    for _ in range(STEPS):
        step()
