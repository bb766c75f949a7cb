"""Rank 0 hosts the store of the job, and ends; rank 1 trains on alone under the default pack."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from small import sgd, take_step
from torch import nn

import gradsurgeon

STEPS = 20
FILE, WHEN = Path(sys.argv[1]), sys.argv[2]


def has_ended(process: Path) -> bool:
    try:
        os.kill(int(process.read_text(encoding="utf-8")), 0)
    except ProcessLookupError:
        return True
    except (FileNotFoundError, ValueError):  # it has yet to write the number
        return False
    return False


def await_end_of_rank_0(now: str) -> None:
    while dist.get_rank() and now == WHEN and not has_ended(Path(f"{FILE}.pid")):
        time.sleep(0.01)


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
torch.manual_seed(0)
model = nn.Linear(16, 4)
optimizer = sgd(model)
await_end_of_rank_0("before the session")
session = gradsurgeon.apply(model, "gradsurgeon:debug@1", optimizer=optimizer)
await_end_of_rank_0("before the first update")
for step in range(STEPS):
    take_step(optimizer, model(torch.randn(8, 16)).square().mean())
    if step == 3:
        await_end_of_rank_0("after some updates")
session.remove()
Path(f"{FILE}.{dist.get_rank()}").write_text(str(session.step), encoding="utf-8")
if dist.get_rank() == 0:
    Path(f"{FILE}.pid").write_text(str(os.getpid()), encoding="utf-8")
