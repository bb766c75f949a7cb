"""What a tool can leave behind on models, on optimizers and in torch."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.profiler import record_function
from torch.nn.utils import clip_grad

# What a session replaces while it is there.
REPLACED = [
    (record_function, "__exit__"),
    (torch.utils, "swap_tensors"),
    (Tensor, "retain_grad"),
    (GradScaler, "scale"),
    (GradScaler, "step"),
    (sys.modules["torch.distributed"].Reducer, "prepare_for_backward"),
    (clip_grad, "_clip_grads_with_norm_"),
    (clip_grad, "clip_grad_value_"),
]


def global_hooks() -> list[object]:
    optim = sys.modules["torch.optim.optimizer"]
    module = sys.modules["torch.nn.modules.module"]
    return [
        *optim._global_optimizer_pre_hooks.values(),
        *optim._global_optimizer_post_hooks.values(),
        *module._global_forward_hooks.values(),
        *module._global_forward_pre_hooks.values(),
        *module._global_backward_hooks.values(),
        torch.autograd.graph.log,
        torch.autograd.graph._register_logging_hooks_on_whole_graph,
        *[vars(owner).get(name) for owner, name in REPLACED],
    ]


def trace(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[object]:
    """Everything that a tool could leave on a model and its optimizers."""
    found: list[object] = []
    for name, param in model.named_parameters(remove_duplicate=False):
        hooks = (param._backward_hooks, param._post_accumulate_grad_hooks)
        found.append((name, id(param), param.requires_grad, hooks, sorted(vars(param))))
    for name, module in model.named_modules():
        tables = [
            module._forward_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._backward_hooks,
            module._backward_pre_hooks,
        ]
        found.append((name, id(module), [(dict(t), vars(t)) for t in tables], sorted(vars(module))))
    for optimizer in optimizers:
        found.append(dict(optimizer._optimizer_step_pre_hooks))
        found.append(dict(optimizer._optimizer_step_post_hooks))
    found.append(global_hooks())
    return found
