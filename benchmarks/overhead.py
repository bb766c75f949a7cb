"""What a step costs with rules or a peer on the model, beside the same step without."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import counts, peers, rule_sets
from benchmarks.cases import BARE, Attached, Case, step_of
from benchmarks.machine import EXTRA, version
from benchmarks.measure import Budget, clock, compared, interleave, over, warm_up
from benchmarks.workloads import TINY, WORKLOADS, Task, Workload

Row = dict[str, Any]
Step = Callable[[], None]

GROUP = "overhead"
FULL = Budget(rounds=200, seconds=1.2, least=4)
QUICK = Budget(rounds=60, seconds=0.8, least=5)
# So many steps are watched for the memory at their peak; what waits on the device gathers over steps.
_STEPS_WATCHED = 3


class Bare:
    """The steps that all cases of a workload are compared with.

    Args:
        task: without anything on it.
        device: kind of device.
    """

    def __init__(self, task: Task, device: str) -> None:
        self.device = device
        self.step = step_of(task, Attached())
        flat = torch.randn(sum(param.numel() for param in task.params), device=device)
        # What costs are divided by: the clipping that most scripts do, and one look at every element.
        self.clip = partial(torch.nn.utils.clip_grad_norm_, task.params, 1e9)
        self.read = partial(torch.linalg.vector_norm, flat)
        # The same bytes as they lie: a norm of each tensor by itself.
        self.reads = partial(_norm_of_each, [param.detach() for param in task.params])

    def against(self, step: Step, budget: Budget) -> Row:
        """Return what a step costs beyond the bare one."""
        lanes = (self.step, step, self.clip, self.read, self.reads)
        warm_up(lanes, budget.seconds / 4)
        base, case, clip, read, reads = interleave(lanes, clock(self.device), budget)
        return {
            **compared(base, case),
            "clip_ratio": over(base, case, clip).to_dict(),
            "read_ratio": over(base, case, read).to_dict(),
            "reads_ratio": over(base, case, reads).to_dict(),
        }


def _norm_of_each(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        torch.linalg.vector_norm(tensor)


def all_cases() -> list[Case]:
    """Return everything that can be put on a model, the noise first."""
    return [BARE, *rule_sets.cases(), *peers.cases()]


def planned(*, quick: bool) -> Iterator[tuple[Workload, list[Case]]]:
    """Yield what is measured on which workload; of the single actions one round is enough if quick."""
    for workload in WORKLOADS:
        if workload.quick or not quick:
            cases = [case for case in all_cases() if case.suits(workload)]
            short = quick and workload is not TINY
            yield workload, [case for case in cases if not (short and case.alone)]


def measured(
    device: str, *, quick: bool, only: Collection[tuple[str, str]] | None = None
) -> Iterator[Row]:
    """Yield one row per workload and case.

    Args:
        device: kind of device.
        quick: the workloads and the budget of the quick mode.
        only: pairs of workload and case, where not all are wanted; any workload then.
    """
    budget = QUICK if quick else FULL
    for workload, cases in planned(quick=quick and only is None):
        wanted = [case for case in cases if only is None or (workload.name, case.name) in only]
        if wanted:
            yield from of_workload(workload, wanted, device, budget)


def of_workload(
    workload: Workload, cases: Sequence[Case], device: str, budget: Budget
) -> Iterator[Row]:
    """Yield one row per case."""
    task = workload.build(device)
    bare = Bare(task, device)
    peak = counts.peak(partial(_repeat, bare.step), device)
    count = counts.counted(bare.step, device)
    for case in cases:
        row: Row = {"group": GROUP, "workload": workload.name, "case": case.name, "kind": case.kind}
        if case.package and version(case.package) == "missing":
            yield row | {"skipped": f"needs {case.package}: {EXTRA}"}
            continue
        try:
            found, own, most = _series(bare, workload.build(device), case, budget)
        except Exception as error:
            if case.kind != "peer":
                raise
            # Half an hour of measurements must not be lost to somebody else's fault.
            yield row | {"skipped": f"did not run: {type(error).__name__}: {error}"}
        else:
            yield row | found | own.beyond(count) | {"peak_bytes": most - peak}
        gc.collect()


def _repeat(step: Step) -> None:
    for _ in range(_STEPS_WATCHED):
        step()


def _series(bare: Bare, task: Task, case: Case, budget: Budget) -> tuple[Row, counts.Counts, int]:
    """Return the times of one case, what its step does, and its memory at the peak."""
    with warnings.catch_warnings():
        # Rules that nobody would write so, such as every action at once, are warned of.
        warnings.simplefilter("ignore")
        return _measured(bare, task, case, budget)


def _measured(bare: Bare, task: Task, case: Case, budget: Budget) -> tuple[Row, counts.Counts, int]:
    made: list[Attached] = []

    def begin() -> None:
        made.append(case.attach(task))
        _repeat(step_of(task, made[0]))

    # From the start on: some memory is taken when the case is put on.
    peak = counts.peak(begin, bare.device)
    try:
        step = step_of(task, made[0])
        if case.rest:
            # Weights that never move keep checks awake. The update takes as long as the bare one.
            task.optimizer.param_groups[0]["lr"] = 1e-3
        for _ in range(case.rest):
            step()
        found = bare.against(step, budget)
        found["waits"] = counts.waits(step, bare.device)
        return found, counts.counted(step, bare.device), peak
    finally:
        made[0].detach()
