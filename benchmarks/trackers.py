"""What three trackers at once cost the thread that trains, beside the norms that they are sent."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import gradsurgeon
from benchmarks.measure import rounded
from benchmarks.overhead import Row
from gradsurgeon.sinks.delivery import close_all
from gradsurgeon.sinks.sink import at_place, why_no_sink

GROUP = "trackers"
BARE, NORMS, ALL = "no rule", "norms", "norms, three trackers"
# Blocks of steps, by turns: what else the machine does hits all of them.
_ROUNDS, _QUICK_ROUNDS, _STEPS = 7, 2, 200
_WIDTH, _DEPTH = 192, 20


class _Training:
    def __init__(self, device: str, sinks: list[Any] | None) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(_DEPTH) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(64, _WIDTH, device=device)
        rules = {"version": 1, "rules": [{"id": "norms", "action": "norm-log", "params": "*"}]}
        self.session = None if sinks is None else gradsurgeon.apply(self.model, rules, sinks=sinks)

    def block(self) -> tuple[float, float]:
        """Return what a step takes: seconds of this thread at work, and seconds until it is over."""
        at_work, begin = time.thread_time(), time.perf_counter()
        for _ in range(_STEPS):
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
        return (
            (time.thread_time() - at_work) / _STEPS,
            (time.perf_counter() - begin) / _STEPS,
        )


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per case; none where a client is missing."""
    with tempfile.TemporaryDirectory(prefix="gradsurgeon-benchmark-") as folder, _offline(folder):
        places = [f"tensorboard:{folder}/tb", "wandb:benchmark", f"mlflow:sqlite:///{folder}/ml.db"]
        if missing := [reason for place in places if (reason := why_no_sink(place))]:
            yield {"group": GROUP, "case": ALL, "why": "; ".join(missing)}
            return
        tasks = {
            BARE: _Training(device, None),
            NORMS: _Training(device, []),
            ALL: _Training(device, [at_place(place) for place in places]),
        }
        for task in tasks.values():
            task.block()
        blocks: dict[str, list[tuple[float, float]]] = {case: [] for case in tasks}
        for _ in range(_QUICK_ROUNDS if quick else _ROUNDS):
            for case, task in tasks.items():
                blocks[case].append(task.block())
        begin = time.perf_counter()
        for task in tasks.values():
            if task.session is not None:
                task.session.remove()
        ended = time.perf_counter() - begin
        close_all()  # while their folder is there
    for case, found in blocks.items():
        at_work, over = (median(values) for values in zip(*found, strict=True))
        row = {"group": GROUP, "case": case, "thread_s": rounded(at_work), "step_s": rounded(over)}
        yield {**row, "end_s": rounded(ended)} if case == ALL else row


@contextlib.contextmanager
def _offline(folder: str) -> Iterator[None]:
    """Let no client ask for a network, or write anywhere else."""
    names = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": folder}
    before, here = dict(os.environ), Path.cwd()
    os.environ.update(names)
    os.chdir(folder)
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.teardown()  # it read the environment once, when another group used it
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)
