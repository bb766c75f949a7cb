"""The same work, done by a rule and by what people write today, on every workload.

Each job is measured with all of its ways in turn, on models of their own, so that what is compared comes
from the same rounds: our extra cost over that of the cheapest peer, and over the floor, which is the work
itself, written by hand in the fewest calls of torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from benchmarks import peers, rule_sets
from benchmarks.cases import Attached, Case, step_of
from benchmarks.machine import EXTRA, version
from benchmarks.measure import Budget, clock, interleave, spread, warm_up
from benchmarks.overhead import Row
from benchmarks.workloads import WORKLOADS, Task, Workload

GROUP = "like for like"
FULL = Budget(rounds=200, seconds=4.0, least=6)
QUICK = Budget(rounds=60, seconds=1.5, least=4)
_WIDTH = 256

Attach = Callable[[Task], Attached]


@dataclass(frozen=True, slots=True)
class Job:
    """Something that is done to the gradients, or the outputs, of every step.

    Attributes:
        name: what rows call it.
        rules: that do it.
        peers: other ways, by what they are called.
        floor: what it is called, and the least that has to be done.
        forward: it makes sense only where a step has a forward pass.
        packages: what a peer needs beside torch.
    """

    name: str
    rules: Sequence[rule_sets.RuleDict]
    peers: Mapping[str, Attach]
    floor: tuple[str, Attach]
    forward: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)


def after_pass(act: Callable[[list[Tensor]], object]) -> Attach:
    """Return what a script does with all gradients between backward and update."""

    def attach(task: Task) -> Attached:
        def run() -> None:
            act([param.grad for param in task.params if param.grad is not None])

        return Attached(after_backward=run)

    return attach


def norms_of(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(grads)))  # noqa: SLF001 # torch has no public one


def _raise_if_nonfinite(grads: list[Tensor]) -> None:
    if not torch.linalg.vector_norm(norms_of(grads)).isfinite():
        raise FloatingPointError("a gradient is not finite")


def _clip(grads: list[Tensor]) -> None:
    factor = (1e-3 / (torch.linalg.vector_norm(norms_of(grads)) + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor)


def _clamp(grads: list[Tensor]) -> None:
    torch._foreach_clamp_min_(grads, -1.0)  # torch has no public functions
    torch._foreach_clamp_max_(grads, 1.0)


def _zero(grads: list[Tensor]) -> None:
    torch._foreach_zero_(grads)


def _halve(grads: list[Tensor]) -> None:
    torch._foreach_mul_(grads, 0.5)


def on_each_param(act: Callable[[Tensor], Tensor | None], task: Task) -> Attached:
    """Put one hook on every parameter, as people write it."""
    handles = [
        param.register_hook(act)  # type: ignore[no-untyped-call] # torch has no types there
        for param in task.params
    ]
    return peers.taken_off(handles)


def _is_finite(grad: Tensor) -> None:
    if not grad.isfinite().all():
        raise FloatingPointError("a gradient is not finite")


def _keep_each(task: Task) -> Attached:
    kept: dict[int, Tensor] = {}

    def keep(number: int, grad: Tensor) -> None:
        kept[number] = grad.clone()

    handles = [
        param.register_hook(partial(keep, number))  # type: ignore[no-untyped-call] # as above
        for number, param in enumerate(task.params)
    ]
    return peers.taken_off(handles)


def _keep_all() -> Attach:
    kept: list[Tensor] = []

    def keep(grads: list[Tensor]) -> None:
        kept[:] = [grad.clone() for grad in grads]

    return after_pass(keep)


Act = Callable[[Tensor], object]
# Shows tensors of every module to a function, as people write it.
Place = Callable[[Act, Task], list[RemovableHandle]]


def _on_outputs(act: Act, task: Task) -> list[RemovableHandle]:
    def show(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        act(output.detach())

    return [module.register_forward_hook(show) for module in task.model.modules()]


def _on_output_grads(act: Act, task: Task) -> list[RemovableHandle]:
    def arrived(grad: Tensor) -> None:
        act(grad)

    def show(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        if output.requires_grad:
            output.register_hook(arrived)

    return [module.register_forward_hook(show) for module in task.model.modules()]


def _read_each(place: Place, task: Task) -> Attached:
    return peers.taken_off(place(lambda tensor: tensor.norm().item(), task))


def _stacked(place: Place, measure: Callable[[Tensor], Sequence[Tensor]], task: Task) -> Attached:
    """Measure every tensor where it appears, and put the numbers of a step together at its end."""
    numbers: list[Tensor] = []
    rows: list[Tensor] = []

    def stack() -> None:
        rows[:] = [torch.stack(numbers)]
        numbers.clear()

    handles = place(lambda tensor: numbers.extend(measure(tensor)), task)
    return replace(peers.taken_off(handles), after_backward=stack)


def _norm(tensor: Tensor) -> Sequence[Tensor]:
    return [tensor.norm()]


def _norm_and_sums(tensor: Tensor) -> Sequence[Tensor]:
    """Return the norm, and as few sums as a projection could be."""
    flat = tensor.reshape(-1)
    rows = flat[: len(flat) // _WIDTH * _WIDTH].view(-1, _WIDTH)
    return [flat.norm(), torch.mv(rows, flat.new_ones(_WIDTH)).sum()]


stop_at_nan = after_pass(_raise_if_nonfinite)

JOBS = (
    Job(
        "norm of every gradient",
        [{"action": "norm-log"}],
        {
            "Lightning grad_norm": peers.grad_norm,
            "register_hook closures": partial(peers.hooks, Tensor.detach),
            "register_hook closures with .item()": partial(peers.hooks, Tensor.item),
        },
        ("torch._foreach_norm", after_pass(norms_of)),
        packages={"Lightning grad_norm": "lightning"},
    ),
    Job(
        "stop at a NaN",
        [{"action": "nan-trap"}],
        {"isfinite in a hook of every parameter": partial(on_each_param, _is_finite)},
        ("one isfinite of the total norm", stop_at_nan),
    ),
    Job(
        "clip that bites",
        [{"action": "clip-norm", "max_norm": 1e-3, "per": "rule"}],
        {"clip_grad_norm_": partial(peers.clip_norm, 1e-3)},
        ("torch._foreach_norm and _foreach_mul_", after_pass(_clip)),
    ),
    Job(
        "clamp",
        [{"action": "clamp", "min": -1.0, "max": 1.0, "at": "step"}],
        {
            "clip_grad_value_": peers.clip_value,
            "register_hook closures": partial(on_each_param, lambda grad: grad.clamp(-1.0, 1.0)),
        },
        ("torch._foreach_clamp_min_ and _max_", after_pass(_clamp)),
    ),
    Job(
        "zero",
        [{"action": "zero", "at": "step"}],
        {"register_hook closures": partial(on_each_param, torch.zeros_like)},
        ("torch._foreach_zero_", after_pass(_zero)),
    ),
    Job(
        "scale",
        [{"action": "scale", "factor": 0.5, "at": "step"}],
        {"register_hook closures": partial(on_each_param, lambda grad: grad * 0.5)},
        ("torch._foreach_mul_", after_pass(_halve)),
    ),
    Job(
        "keep every gradient",
        [{"action": "capture"}],
        {"register_hook closures": _keep_each},
        ("a clone of each", _keep_all()),
    ),
    Job(
        "norm of every module's output",
        [{"action": "norm-log", "modules": "*", "tensor": "output"}],
        {"forward hooks with .item()": partial(_read_each, _on_outputs)},
        ("forward hooks and one stack", partial(_stacked, _on_outputs, _norm)),
        forward=True,
    ),
    Job(
        "norm and projection of every module's output",
        [{"action": "norm-log", "modules": "*", "tensor": "output", "stats": ["l2", "projection"]}],
        {"forward hooks with .item()": partial(_read_each, _on_outputs)},
        ("forward hooks, norms and row sums", partial(_stacked, _on_outputs, _norm_and_sums)),
        forward=True,
    ),
    Job(
        "norm of every module's output gradient",
        [{"action": "norm-log", "modules": "*", "tensor": "output.grad"}],
        {"tensor hooks from forward hooks with .item()": partial(_read_each, _on_output_grads)},
        ("tensor hooks and one stack", partial(_stacked, _on_output_grads, _norm)),
        forward=True,
    ),
)


def measured(device: str, *, quick: bool, only: Collection[str] = ()) -> Iterator[Row]:
    """Yield one row per workload and job; ``only`` names workloads."""
    for workload in WORKLOADS:
        if workload.is_wanted(only, quick=quick):
            yield from of_workload(workload, device, QUICK if quick else FULL)


def of_workload(
    workload: Workload,
    device: str,
    budget: Budget,
    *,
    jobs: Sequence[Job] = JOBS,
    group: str = GROUP,
) -> Iterator[Row]:
    """Yield one row per job that a workload has."""
    for job in jobs:
        if workload.forward or not job.forward:
            yield {"group": group, "workload": workload.name, "job": job.name} | _measured(
                job, workload, device, budget
            )
            gc.collect()


def _measured(job: Job, workload: Workload, device: str, budget: Budget) -> Row:
    """Return the extra costs of all ways to do a job, in microseconds, and how ours compares."""
    ours = rule_sets.case(job.name, job.rules)
    named = {
        name: attach
        for name, attach in job.peers.items()
        if version(job.packages.get(name, "torch")) != "missing"
    }
    ways = [ours, *(Case(name, "peer", attach) for name, attach in named.items())]
    ways.append(Case(job.floor[0], "peer", job.floor[1]))
    tasks = [workload.build(device) for _ in ways]
    made = [way.attach(task) for way, task in zip(ways, tasks, strict=True)]
    bare = step_of(workload.build(device), Attached())
    lanes = [bare, *(step_of(task, one) for task, one in zip(tasks, made, strict=True))]
    try:
        warm_up(lanes, budget.seconds / 4)
        base, *times = interleave(lanes, clock(device), budget)
    finally:
        for one in made:
            one.detach()
    beyond = [[later - sooner for sooner, later in zip(base, own, strict=True)] for own in times]
    extra = [spread(one) for one in beyond]
    found, *others, floor = (one.median for one in extra)
    cheapest = min(range(len(others)), key=others.__getitem__)
    return {
        "base_us": spread(base).to_dict(),
        "extra_us": extra[0].to_dict(),
        "peers_us": {name: one.to_dict() for name, one in zip(named, extra[1:-1], strict=True)},
        "floor": job.floor[0],
        "floor_us": extra[-1].to_dict(),
        "cheapest": list(named)[cheapest],
        "of_peer": ratio(found, others[cheapest]),
        "of_floor": ratio(found, floor),
        "beside_floor": spread([one / floor for one in beyond[0]]).to_dict() if floor > 0 else None,
        "missing": {n: f"needs {p}: {EXTRA}" for n, p in job.packages.items() if n not in named},
    }


def ratio(extra: float, other: float) -> float | None:
    """Return a ratio of two extra costs, ``None`` where the other one is within noise of nothing."""
    return float(f"{extra / other:.4g}") if other > 0 else None
