"""What edits rows, elements, groups, weights and updates: one rule each, and the set-ups in which it acts as in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranks import Json
from safetensors.torch import save_file
from small import tanh_net
from torch import Tensor, nn

import gradsurgeon

# The rule of each line of the table, without its parameters.
ACTIONS: dict[str, Json] = {
    "`mask`, `rows`": {"action": "mask", "rows": "1:"},
    "`mask`, `file`": {"action": "mask", "file": "masks.safetensors"},
    "`mask`, `then: freeze`": {"action": "mask", "file": "masks.safetensors", "then": "freeze"},
    "`clip-norm`, `per: module`": {"action": "clip-norm", "per": "module", "max_norm": 0.05},
    "`clip-norm`, `per: unit`": {"action": "clip-norm", "per": "unit", "max_norm": 0.02},
    "`noise`": {"action": "noise", "std": 0.1},
    "`centralize`": {"action": "centralize"},
    "a ramp": {"action": "scale", "at": "step", "factor": {"from": 0, "to": 1, "steps": 3}},
    "`tensor: value`": {"action": "clamp", "tensor": "value", "min": -0.2, "max": 0.2},
    "`tensor: update`": {"action": "scale", "tensor": "update", "factor": 0.1},
    "a fixed bound": {"action": "spike-trap", "above": {"norm": 0.05}, "then": "clip"},
}
# They need whole rows.
OF_ROWS = ("`clip-norm`, `per: unit`", "`centralize`")
# The set-ups of one process, and those of several ranks.
ALONE = ("accumulation", "GradScaler", "observe", "`torch.compile`", "resumed")
ON_RANKS = ("DDP", "FSDP2", "tensor parallel")
UPDATES = 4
Batch = Callable[[int], Tensor]


def rules_in(folder: Path, action: str, model: nn.Module, params: str = "*.weight") -> Path:
    """Write the rule of a line, and the masks that it may name."""
    torch.manual_seed(3)
    masks = {name: torch.rand(p.shape) > 0.5 for name, p in model.named_parameters()}
    save_file(masks, folder / "masks.safetensors")
    path = folder / "rules.yaml"
    rule = {"id": "it", "params": params, **ACTIONS[action]}
    path.write_text(json.dumps({"version": 1, "rules": [rule]}), encoding="utf-8")
    return path


def make() -> nn.Sequential:
    """Return a model whose rows two ranks share unevenly."""
    torch.manual_seed(0)
    return tanh_net(4, 5, 3)


def momentum(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def train(
    model: Any,
    rules: Path | None,
    batch: Batch,
    *,
    parts: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    called: Any = None,
    divisor: float | None = None,
    **options: Any,
) -> gradsurgeon.Session | None:
    """Train for some updates, of some micro-batches each.

    ``called`` is the model with something around it; with a ``divisor`` the loss is a sum over elements, divided by it.
    """
    optimizer = momentum(model)
    session = None
    if rules is not None:
        session = gradsurgeon.apply(model, rules, optimizer=optimizer, **options)
    for step in range(UPDATES):
        update(called or model, optimizer, batch(step), parts=parts, scaler=scaler, divisor=divisor)
    if session is not None:
        session.remove()
    return session


def update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Tensor,
    *,
    parts: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    divisor: float | None = None,
) -> None:
    optimizer.zero_grad()
    for part in batch.chunk(parts):
        squares = model(part).square()
        loss = squares.mean() / parts
        if divisor is not None:
            loss = squares.sum() / divisor
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def table() -> str:
    """Return the table of these actions and set-ups, each cell of which a test is behind."""
    setups = (*ALONE, *ON_RANKS)
    lines = [f"| | {' | '.join(setups)} |", f"|---|{'---|' * len(setups)}"]
    for action in ACTIONS:
        cells = [_word(action, setup) for setup in setups]
        lines.append(f"| {action} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _word(action: str, setup: str) -> str:
    if setup == "observe":
        return "counts"
    if setup == "tensor parallel" and action in OF_ROWS:
        return "acts (1)"
    if setup == "FSDP2" and action == OF_ROWS[0]:
        return "acts (1)"
    return "acts"
