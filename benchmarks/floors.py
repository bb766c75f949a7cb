"""What rules cost beside their floor: the same work by hand, in the fewest calls of torch, in the same rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers, rule_sets
from benchmarks.cases import BARE, Attached, Case, step_of
from benchmarks.measure import Budget, clock, interleave, spread, warm_up
from benchmarks.overhead import Row
from benchmarks.workloads import EMBEDDING, GPT2, MLP, RESNET, Task, Workload

GROUP = "floors"
FULL = Budget(rounds=600, seconds=30.0, least=20)
QUICK = Budget(rounds=200, seconds=3.0, least=5)
FORENSICS = "keeping the call of the model"
_TRAP, _PLAIN = "nan-trap", "nan-trap, forensics: false"
_CALL, _ALL = "the call by hand", "the pack by hand"
_EACH = 256  # a sample of an output has so many elements


def keep_call(task: Task) -> Attached:
    """Keep what a replay needs of the call: inputs, random state, a sample of the output and its gradient."""
    kept: dict[str, Any] = {}

    def before(module: nn.Module, args: Any) -> None:
        del module
        kept.update(args=args, random=torch.get_rng_state())

    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        del module, args
        flat = output.detach().reshape(-1)
        kept["sample"] = flat[:: max(1, len(flat) // _EACH)].clone()
        assert output.grad_fn is not None  # it is trained
        output.grad_fn.register_prehook(lambda grads: kept.update(grads=grads))

    first = task.model.register_forward_pre_hook(before)
    return peers.taken_off([first, task.model.register_forward_hook(after)])


def both_looks(task: Task) -> Attached:
    """Keep the call, take all norms after the pass and before the update, keep one row, read both at once."""
    rows: list[Tensor] = []

    def norms() -> Tensor:
        grads = [param.grad for param in task.params if param.grad is not None]
        return torch.stack(torch._foreach_norm(grads))  # noqa: SLF001 # torch has no public one

    def look() -> None:
        after_pass, at_update = norms(), norms()
        rows[:] = [after_pass.clone()]
        if not math.isfinite(sum(torch.cat([after_pass, at_update]).tolist())):
            raise FloatingPointError("a gradient is not finite")

    return Attached(after_backward=look, detach=keep_call(task).detach)


def _ways() -> list[Case]:
    pack = next(case for case in rule_sets.resting() if case.name == rule_sets.PACK)
    return [
        pack,
        rule_sets.case(_TRAP, [{"action": "nan-trap"}]),
        rule_sets.case(_PLAIN, [{"action": "nan-trap", "forensics": False}]),
        Case(_CALL, "peer", keep_call),
        Case(_ALL, "peer", both_looks),
        BARE,
    ]


def measured(device: str, *, quick: bool, only: Collection[str] = ()) -> Iterator[Row]:
    """Yield one row per workload and job; ``only`` names workloads."""
    for workload in (MLP, EMBEDDING, RESNET, GPT2):
        if workload.is_wanted(only, quick=quick):
            yield from of_workload(workload, device, QUICK if quick else FULL)


def of_workload(workload: Workload, device: str, budget: Budget) -> Iterator[Row]:
    """Yield what the pack and keeping a call cost, in units of a step and of their floors."""
    extra, base = _extra(workload, device, budget)
    jobs = {rule_sets.PACK: (extra[rule_sets.PACK], extra[_ALL])}
    if workload is MLP:  # in a longer step it is noise
        kept = [armed - plain for armed, plain in zip(extra[_TRAP], extra[_PLAIN], strict=True)]
        jobs[FORENSICS] = kept, extra[_CALL]
    for job, (ours, floor) in jobs.items():
        unit = statistics.median(floor)
        yield {
            "group": GROUP,
            "workload": workload.name,
            "job": job,
            "step_ratio": spread([1 + a / b for a, b in zip(ours, base, strict=True)]).to_dict(),
            "floor_ratio": spread([1 + a / b for a, b in zip(floor, base, strict=True)]).to_dict(),
            "beside_floor": spread([a / unit for a in ours]).to_dict(),
        }


def _extra(
    workload: Workload, device: str, budget: Budget
) -> tuple[Mapping[str, list[float]], list[float]]:
    """Return what each way adds to the bare step by round, and the bare steps."""
    ways = _ways()
    tasks = [workload.build(device) for _ in ways]
    made = [way.attach(task) for way, task in zip(ways, tasks, strict=True)]
    lanes = [step_of(task, one) for task, one in zip(tasks, made, strict=True)]
    for way, task, lane in zip(ways, tasks, lanes, strict=True):
        # As in `overhead`: checks rest after updates that move weights.
        task.optimizer.param_groups[0]["lr"] = 1e-3 if way.rest else 0.0
        for _ in range(way.rest):
            lane()
    warm_up(lanes, budget.seconds / 4)
    *times, base = interleave(lanes, clock(device), budget)
    for one in made:
        one.detach()
    names = [way.name for way in ways[:-1]]
    return {
        name: [own - bare for own, bare in zip(series, base, strict=True)]
        for name, series in zip(names, times, strict=True)
    }, base
