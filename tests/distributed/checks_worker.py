"""Trainings on several ranks under the default rules; each rank writes down what the checks told of each of them."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from distributed.faulty_ranks import FAULTY
from distributed.healthy_ranks import HEALTHY
from distributed.rank_job import STEPS, Job, fit, net
from ranks import Json
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD
from worker import work

from gradsurgeon.actions.checks import ranks_check
from gradsurgeon.records import shared_rows

# The rank that ends first waits so long for rows that the others have: they end later.
shared_rows.LIMIT = 0.5
ranks_check.LIMIT = 0.5


def sharded_at_rest(job: Job) -> None:
    """The optimizer has the parts of the last layer alone."""
    model = net()
    fully_shard(model)
    optimizer = SGD([*model.parameters()][2:], 0.1)
    job.watch(model, optimizer)
    fit(model, optimizer)


def one_batch(job: Job) -> None:
    """The script overfits one batch, to see whether the model can."""
    model, optimizer = job.wrapped()
    batch = torch.ones(8, 16)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def find() -> Json:
    """Run all trainings on so many ranks."""
    # Sessions look for wrappers among all live objects: torch itself need not be searched each time.
    gc.freeze()
    world = dist.get_world_size()
    cases = {name: fault.case for name, fault in FAULTY[world].items()}
    cases |= HEALTHY[world]
    if world == 2:
        cases["sharded_at_rest"] = sharded_at_rest
        cases["one_batch"] = one_batch
    found = {}
    for name, case in cases.items():
        job = Job()
        case(job)
        found[name] = job.found()
    return found


work(find)
