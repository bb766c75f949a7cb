"""Trains one small model in set-ups under rule sets; each rank writes down the ends."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist
from distributed.batches import data, make, whole, wrapped
from ranks import Json
from small import rules_of_workers
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon

STEPS = 4
PROCESSES = ("one process", "one process, fused", "DDP", "FSDP2")
VARIANTS = ("plain", "accumulation", "scaler", "accumulation + scaler")
ACTIONS: dict[str, list[Json]] = rules_of_workers("thresholds")


def train(process: str, variant: str, rules: list[Json]) -> list[list[float]]:
    """Return the weights after training."""
    ranks, rank = (1, 0) if process.startswith("one") else (2, dist.get_rank())
    parts = 2 if "accumulation" in variant else 1
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if "scaler" in variant else None
    model = make()
    called = wrapped(process, model)
    fused = "fused" in process
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, fused=fused)
    session = None
    if rules:
        checked = {"version": 1, "rules": rules}
        session = gradsurgeon.apply(called, checked, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = data(step).chunk(ranks)[rank].chunk(parts)
        for number, part in enumerate(mine):
            sync(called, on=number == len(mine) - 1)
            loss = called(part).square().mean() / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    if session is not None:
        session.remove()
    return [whole(param) for param in model.parameters()]


def sync(model: Any, *, on: bool) -> None:
    """Switch the reduction of gradients on or off, as `no_sync` does."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)


def main() -> Json:
    """Run the set-ups that are asked for."""
    # Sessions look for wrappers among all live objects: torch itself need not be searched each time.
    gc.freeze()
    every = {
        f"{process} | {variant} | {action}": (process, variant, rules)
        for process in PROCESSES
        for variant in VARIANTS
        for action, rules in {**ACTIONS, "no rules": []}.items()
    }
    # What is asked for on the command line, and what it is compared with.
    asked = {
        name
        for name in every
        if name.endswith(" | no rules") or name.startswith("one process | plain | ")
    }
    asked |= set(sys.argv[2:])
    return {name: train(*every[name]) for name in every if name in asked}


if __name__ == "__main__":
    work(main)
