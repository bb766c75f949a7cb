"""What people use without gradsurgeon. Each is called as its own documentation says."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from benchmarks.cases import Attached, Case
from benchmarks.workloads import Task

CLIP, CLIP_BITES = "clip_grad_norm_ that does not bite", "clip_grad_norm_ that bites"


def taken_off(handles: Sequence[RemovableHandle]) -> Attached:
    """Return how a step runs with hooks on the model, which are taken off again."""

    def detach() -> None:
        for handle in handles:
            handle.remove()

    return Attached(detach=detach)


def clip_norm(max_norm: float, task: Task) -> Attached:
    clip = partial(torch.nn.utils.clip_grad_norm_, task.params, max_norm)
    return Attached(after_backward=clip)


def clip_value(task: Task) -> Attached:
    return Attached(after_backward=partial(torch.nn.utils.clip_grad_value_, task.params, 1.0))


def hooks(read: Callable[[Tensor], object], task: Task) -> Attached:
    """Put a closure on every parameter that notes the norm of its gradient, as people write it."""
    norms: dict[str, object] = {}

    def hook(name: str) -> Callable[[Tensor], None]:
        def note(grad: Tensor) -> None:
            norms[name] = read(grad.norm())

        return note

    handles = [
        param.register_hook(hook(name))  # type: ignore[no-untyped-call] # torch has no types there
        for name, param in task.model.named_parameters()
    ]
    return taken_off(handles)


def _anomaly(task: Task) -> Attached:
    del task
    return Attached(around=torch.autograd.detect_anomaly)


def _underflow(task: Task) -> Attached:
    # It has no way back: the model is thrown away after the case.
    import_module("transformers.debug_utils").DebugUnderflowOverflow(task.model)
    return Attached()


def grad_norm(task: Task) -> Attached:
    grad_norm = import_module("lightning.pytorch.utilities").grad_norm
    return Attached(after_backward=partial(grad_norm, task.model, norm_type=2))


def _watch(log_freq: int | None, task: Task) -> Attached:
    wandb: Any = import_module("wandb")
    folder = tempfile.TemporaryDirectory(
        prefix="gradsurgeon-benchmark-", ignore_cleanup_errors=True
    )
    quiet = wandb.Settings(silent=True, console="off")
    run = wandb.init(mode="offline", dir=folder.name, project="benchmark", settings=quiet)
    if log_freq is not None:
        run.watch(task.model, log="gradients", log_freq=log_freq)

    def detach() -> None:
        if log_freq is not None:
            run.unwatch(task.model)
        run.finish()
        folder.cleanup()

    # What the hooks have gathered leaves with the next `log`, which every script that watches calls.
    return Attached(after_backward=lambda: run.log({"loss": 0.0}), detach=detach)


def cases() -> list[Case]:
    """Return all peers; those whose package is missing as well, for a row that says so."""
    return [
        Case(CLIP, "peer", partial(clip_norm, 1e9)),
        Case(CLIP_BITES, "peer", partial(clip_norm, 1e-3)),
        Case("clip_grad_value_", "peer", clip_value),
        Case("register_hook closures", "peer", partial(hooks, Tensor.detach)),
        Case("register_hook closures with .item()", "peer", partial(hooks, Tensor.item)),
        Case("detect_anomaly", "peer", _anomaly, forward=True),
        Case("DebugUnderflowOverflow", "peer", _underflow, forward=True, package="transformers"),
        Case("Lightning grad_norm", "peer", grad_norm, package="lightning"),
        Case("wandb.log alone, for comparison", "peer", partial(_watch, None), package="wandb"),
        Case("wandb.watch, log_freq=1", "peer", partial(_watch, 1), package="wandb"),
        Case("wandb.watch, log_freq=1000", "peer", partial(_watch, 1000), package="wandb"),
    ]
