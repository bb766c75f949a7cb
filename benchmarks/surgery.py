"""What people write by hand into a training loop, done by a rule: masks, noise, groups, weights, bounds, and what the optimizer keeps.

As in `like_for_like`, all ways to do a job are measured in turn. The optimizer has momentum, since one job records it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks import peers
from benchmarks.cases import Attached
from benchmarks.like_for_like import Job, after_pass, norms_of, of_workload, on_each_param
from benchmarks.measure import Budget
from benchmarks.overhead import Row
from benchmarks.workloads import MLP, TINY, WIDE, Task, Workload

GROUP = "surgery"
FULL = Budget(rounds=200, seconds=4.0, least=6)
QUICK = Budget(rounds=60, seconds=1.5, least=4)
_BOUND = 1e-3
_STD = 1e-6
_SIGMAS = 1e9


def _mask(grads: list[Tensor]) -> None:
    torch._foreach_zero_([grad[1:] for grad in grads])  # torch has no public one


def _masked(grad: Tensor) -> Tensor:
    mask = torch.zeros_like(grad)
    mask[:1] = 1
    return grad * mask


def _add_noise(grads: list[Tensor]) -> None:
    for grad in grads:
        grad.add_(torch.randn_like(grad), alpha=_STD)


def _centralize(grads: list[Tensor]) -> None:
    for grad in grads:
        if grad.dim() > 1:
            grad.sub_(grad.mean(tuple(range(1, grad.dim())), keepdim=True))


def _centralized(grad: Tensor) -> Tensor:
    if grad.dim() == 1:
        return grad
    return grad - grad.mean(tuple(range(1, grad.dim())), keepdim=True)


def _groups(task: Task) -> list[list[Tensor]]:
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for name, param in task.model.named_parameters():
        groups[name.rpartition(".")[0]].append(param)
    return list(groups.values())


def _clip_groups_by_torch(task: Task) -> Attached:
    groups = _groups(task)

    def clip() -> None:
        for group in groups:
            torch.nn.utils.clip_grad_norm_(group, _BOUND)

    return Attached(after_backward=clip)


def _clip_groups(task: Task) -> Attached:
    groups = _groups(task)
    sizes = [len(group) for group in groups]
    params = [param for group in groups for param in group]

    def clip() -> None:
        grads = [param.grad for param in params if param.grad is not None]
        norms = torch.split(norms_of(grads), sizes)
        factors = []
        for group in norms:
            factor = (_BOUND / (torch.linalg.vector_norm(group) + 1e-6)).clamp(max=1.0)
            factors += [factor] * len(group)
        torch._foreach_mul_(grads, factors)  # torch has no public one

    return Attached(after_backward=clip)


def _clip(grads: list[Tensor]) -> None:
    norm = torch.linalg.vector_norm(norms_of(grads)).item()
    if norm > _BOUND:
        torch._foreach_mul_(grads, _BOUND / norm)  # torch has no public one


def _after_step(act: Callable[[list[Tensor]], object], task: Task) -> Attached:
    """Act on the weights after each update."""
    weights = [param.detach() for param in task.params]

    def hook(optimizer: Optimizer, args: object, kwargs: object) -> None:
        del optimizer, args, kwargs
        act(weights)

    handle = task.optimizer.register_step_post_hook(hook)
    return Attached(detach=handle.remove)


def _around_step(act: Callable[[list[Tensor], list[Tensor]], object], task: Task) -> Attached:
    """Act on the weights after each update, given copies from before."""
    before: list[Tensor] = []

    def keep() -> None:
        before[:] = [param.detach().clone() for param in task.params]

    after = _after_step(lambda weights: act(weights, before), task)
    return replace(after, after_backward=keep)


def _clamp_each(weights: list[Tensor]) -> None:
    for weight in weights:
        weight.clamp_(-1.0, 1.0)


def _clamp(weights: list[Tensor]) -> None:
    torch._foreach_clamp_min_(weights, -1.0)  # torch has no public ones
    torch._foreach_clamp_max_(weights, 1.0)


def _halve_each(weights: list[Tensor], before: list[Tensor]) -> None:
    for weight, old in zip(weights, before, strict=True):
        weight.copy_(old + (weight - old) * 0.5)


def _halve(weights: list[Tensor], before: list[Tensor]) -> None:
    torch._foreach_lerp_(weights, before, 0.5)  # torch has no public one


def _bound_each(weights: list[Tensor], before: list[Tensor]) -> None:
    changes = [weight - old for weight, old in zip(weights, before, strict=True)]
    norm = torch.stack([change.norm() for change in changes]).norm().item()
    if norm > _BOUND:
        for weight, old, change in zip(weights, before, changes, strict=True):
            weight.copy_(old + change * (_BOUND / norm))


def _bound(weights: list[Tensor], before: list[Tensor]) -> None:
    changes = [weight - old for weight, old in zip(weights, before, strict=True)]
    norm = torch.linalg.vector_norm(norms_of(changes)).item()
    if norm > _BOUND:
        torch._foreach_lerp_(weights, before, 1 - _BOUND / norm)


def _judge_losses(read: Callable[[Tensor], float], task: Task) -> Attached:
    """Compare the loss of each step with a running mean and deviation; the root of the pass stands for the loss."""
    losses: list[float] = []
    mean = 0.0
    variance = 1.0
    value = torch.zeros(())

    def judge() -> None:
        nonlocal mean, variance
        loss = read(value)
        losses[:] = [loss]
        if loss > mean + _SIGMAS * variance**0.5:
            raise FloatingPointError("the loss is a spike")
        mean = 0.97 * mean + 0.03 * loss
        variance = 0.97 * variance + 0.03 * (loss - mean) ** 2

    del task
    return Attached(after_backward=judge)


def _kept(task: Task) -> list[Tensor]:
    return [task.optimizer.state[param]["momentum_buffer"] for param in task.params]


def _read_kept(task: Task) -> Attached:
    norms: list[float] = []

    def read(weights: list[Tensor]) -> None:
        del weights
        norms[:] = [kept.norm().item() for kept in _kept(task)]

    return _after_step(read, task)


def _stack_kept(task: Task) -> Attached:
    rows: list[Tensor] = []

    def read(weights: list[Tensor]) -> None:
        del weights
        rows[:] = [norms_of(_kept(task))]

    return _after_step(read, task)


_HOOKS = "register_hook closures"
_POST_HOOK = "a loop in a step post-hook"
JOBS = (
    Job(
        "mask of rows",
        [{"action": "mask", "rows": ":1"}],
        {_HOOKS: partial(on_each_param, _masked)},
        ("torch._foreach_zero_ of the other rows", after_pass(_mask)),
    ),
    Job(
        "noise",
        [{"action": "noise", "std": _STD}],
        {_HOOKS: partial(on_each_param, lambda grad: grad + torch.randn_like(grad) * _STD)},
        ("torch.randn_like and add_", after_pass(_add_noise)),
    ),
    Job(
        "centralize",
        [{"action": "centralize"}],
        {_HOOKS: partial(on_each_param, _centralized)},
        ("mean and sub_ of each matrix", after_pass(_centralize)),
    ),
    Job(
        "clip per module",
        [{"action": "clip-norm", "max_norm": _BOUND, "per": "module"}],
        {"clip_grad_norm_ of each module": _clip_groups_by_torch},
        ("torch._foreach_norm and _foreach_mul_", _clip_groups),
    ),
    Job(
        "a fixed bound",
        [{"action": "spike-trap", "above": {"norm": _BOUND}}],
        {"clip_grad_norm_": partial(peers.clip_norm, _BOUND)},
        ("torch._foreach_norm and _foreach_mul_", after_pass(_clip)),
    ),
    Job(
        "clamp of weights",
        [{"action": "clamp", "tensor": "value", "min": -1.0, "max": 1.0}],
        {_POST_HOOK: partial(_after_step, _clamp_each)},
        ("torch._foreach_clamp_min_ and _max_", partial(_after_step, _clamp)),
    ),
    Job(
        "scale of updates",
        [{"action": "scale", "tensor": "update", "factor": 0.5}],
        {_POST_HOOK: partial(_around_step, _halve_each)},
        ("clones and torch._foreach_lerp_", partial(_around_step, _halve)),
    ),
    Job(
        "a bound on updates",
        [{"action": "spike-trap", "tensor": "update", "above": {"norm": _BOUND}}],
        {_POST_HOOK: partial(_around_step, _bound_each)},
        ("clones, torch._foreach_norm and _foreach_lerp_", partial(_around_step, _bound)),
    ),
    Job(
        "a bound on the loss",
        [
            {
                "action": "spike-trap", "tensors": "loss", "tensor": "value",
                "above": {"sigmas": _SIGMAS}, "then": "skip-step",
            }
        ],
        {"item() and numbers of Python": partial(_judge_losses, lambda loss: float(loss.item()))},
        ("float() and numbers of Python", partial(_judge_losses, float)),
        forward=True,
    ),
    Job(
        "norms of what the optimizer keeps",
        [{"action": "norm-log", "tensor": "state.momentum_buffer"}],
        {_POST_HOOK: _read_kept},
        ("torch._foreach_norm", _stack_kept),
    ),
)  # fmt: skip


def with_momentum(workload: Workload) -> Workload:
    """Return a workload whose optimizer keeps a momentum."""

    def build(device: str) -> Task:
        task = workload.build(device)
        # Weights move a little: the norm of an update of 0 is computed once more, in float64.
        task.optimizer = torch.optim.SGD(task.params, lr=1e-6, momentum=0.5)
        return task

    return replace(workload, build=build)


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per workload and job."""
    for workload in (MLP,) if quick else (TINY, WIDE, MLP):
        budget = QUICK if quick else FULL
        yield from of_workload(with_momentum(workload), device, budget, jobs=JOBS, group=GROUP)
