"""The same work, done by a rule and by what people write today, on every workload.

Each job is measured with all of its ways in turn, on models of their own, so that what is compared comes
from the same rounds: our extra cost over that of the cheapest peer, and over the floor, which is the work
itself, written by hand in the fewest calls of torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def _after(act: Callable[[list[Tensor]], object]) -> Attach:
    """Return what a script does with all gradients between backward and update."""

    def attach(task: Task) -> Attached:
        def run() -> None:
            act([param.grad for param in task.params if param.grad is not None])

        return Attached(after_backward=run)

    return attach


def _norms(grads: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(grads))  # noqa: SLF001 # torch has no public one


def _raise_if_nonfinite(grads: list[Tensor]) -> None:
    if not torch.linalg.vector_norm(_norms(grads)).isfinite():
        raise FloatingPointError("a gradient is not finite")


def _clip(grads: list[Tensor]) -> None:
    factor = (1e-3 / (torch.linalg.vector_norm(_norms(grads)) + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor)


def _clamp(grads: list[Tensor]) -> None:
    torch._foreach_clamp_min_(grads, -1.0)  # torch has no public functions
    torch._foreach_clamp_max_(grads, 1.0)


def _zero(grads: list[Tensor]) -> None:
    torch._foreach_zero_(grads)


def _halve(grads: list[Tensor]) -> None:
    torch._foreach_mul_(grads, 0.5)


def _on_each_param(act: Callable[[Tensor], Tensor | None], task: Task) -> Attached:
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

    return _after(keep)


def _modules(note: Callable[[str, Tensor], object], task: Task) -> list[RemovableHandle]:
    """Put a forward hook on every module that is shown its output, as people write it."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def show(module: nn.Module, args: Any, output: Any) -> None:
            del module, args
            note(name, output)

        return show

    return [module.register_forward_hook(hook(name)) for name, module in task.model.named_modules()]


def _read_outputs(task: Task) -> Attached:
    norms: dict[str, float] = {}

    def note(name: str, output: Tensor) -> None:
        norms[name] = output.detach().norm().item()

    return peers.taken_off(_modules(note, task))


def _read_output_grads(task: Task) -> Attached:
    norms: dict[str, float] = {}

    def note(name: str, output: Tensor) -> None:
        def arrived(grad: Tensor) -> None:
            norms[name] = grad.norm().item()

        if output.requires_grad:
            output.register_hook(arrived)  # type: ignore[no-untyped-call] # torch has no types there

    return peers.taken_off(_modules(note, task))


def _stack_outputs(task: Task) -> Attached:
    """Take the norm of every output where it appears, and put those of a step together at its end."""
    norms: list[Tensor] = []
    rows: list[Tensor] = []

    def note(_name: str, output: Tensor) -> None:
        norms.append(output.detach().norm())

    return _stacking(norms, rows, _modules(note, task))


def _stack_output_grads(task: Task) -> Attached:
    norms: list[Tensor] = []
    rows: list[Tensor] = []

    def arrived(grad: Tensor) -> None:
        norms.append(grad.norm())

    def note(_name: str, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(arrived)  # type: ignore[no-untyped-call] # torch has no types there

    return _stacking(norms, rows, _modules(note, task))


def _stacking(
    norms: list[Tensor], rows: list[Tensor], handles: Sequence[RemovableHandle]
) -> Attached:
    def stack() -> None:
        rows[:] = [torch.stack(norms)]
        norms.clear()

    return replace(peers.taken_off(handles), after_backward=stack)


JOBS = (
    Job(
        "norm of every gradient",
        [{"action": "norm-log"}],
        {
            "Lightning grad_norm": peers.grad_norm,
            "register_hook closures": partial(peers.hooks, Tensor.detach),
            "register_hook closures with .item()": partial(peers.hooks, Tensor.item),
        },
        ("torch._foreach_norm", _after(_norms)),
        packages={"Lightning grad_norm": "lightning"},
    ),
    Job(
        "stop at a NaN",
        [{"action": "nan-trap"}],
        {"isfinite in a hook of every parameter": partial(_on_each_param, _is_finite)},
        ("one isfinite of the total norm", _after(_raise_if_nonfinite)),
    ),
    Job(
        "clip that bites",
        [{"action": "clip-norm", "max_norm": 1e-3, "per": "rule"}],
        {"clip_grad_norm_": partial(peers.clip_norm, 1e-3)},
        ("torch._foreach_norm and _foreach_mul_", _after(_clip)),
    ),
    Job(
        "clamp",
        [{"action": "clamp", "min": -1.0, "max": 1.0, "at": "step"}],
        {
            "clip_grad_value_": peers.clip_value,
            "register_hook closures": partial(_on_each_param, lambda grad: grad.clamp(-1.0, 1.0)),
        },
        ("torch._foreach_clamp_min_ and _max_", _after(_clamp)),
    ),
    Job(
        "zero",
        [{"action": "zero", "at": "step"}],
        {"register_hook closures": partial(_on_each_param, torch.zeros_like)},
        ("torch._foreach_zero_", _after(_zero)),
    ),
    Job(
        "scale",
        [{"action": "scale", "factor": 0.5, "at": "step"}],
        {"register_hook closures": partial(_on_each_param, lambda grad: grad * 0.5)},
        ("torch._foreach_mul_", _after(_halve)),
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
        {"forward hooks with .item()": _read_outputs},
        ("forward hooks and one stack", _stack_outputs),
        forward=True,
    ),
    Job(
        "norm of every module's output gradient",
        [{"action": "norm-log", "modules": "*", "tensor": "output.grad"}],
        {"tensor hooks from forward hooks with .item()": _read_output_grads},
        ("tensor hooks and one stack", _stack_output_grads),
        forward=True,
    ),
)


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per workload and job.

    Args:
        device: kind of device.
        quick: the workloads and the budget of the quick mode.
    """
    for workload in WORKLOADS:
        if workload.quick or not quick:
            yield from of_workload(workload, device, QUICK if quick else FULL)


def of_workload(workload: Workload, device: str, budget: Budget) -> Iterator[Row]:
    """Yield one row per job that a workload has."""
    for job in JOBS:
        if workload.forward or not job.forward:
            yield {"group": GROUP, "workload": workload.name, "job": job.name} | _measured(
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
