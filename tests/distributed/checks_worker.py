"""Trainings on several ranks under the default rules; each rank writes down what the checks told of each of them."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch.distributed as dist
from distributed.faulty_ranks import FAULTY
from distributed.healthy_ranks import HEALTHY
from distributed.rank_job import Job, fit, net
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD
from worker import work


def sharded_at_rest(job: Job) -> None:
    """The optimizer has the parts of the last layer alone."""
    model = net()
    fully_shard(model)
    optimizer = SGD([*model.parameters()][2:], 0.1)
    job.watch(model, optimizer)
    fit(model, optimizer)


def find() -> dict[str, Any]:
    """Run the trainings that are named on the command line."""
    # Sessions look for wrappers among all live objects: torch itself need not be searched each time.
    gc.freeze()
    world = dist.get_world_size()
    cases = {name: fault.case for name, fault in FAULTY[world].items()}
    cases |= HEALTHY[world]
    cases["sharded_at_rest"] = sharded_at_rest
    found = {}
    for name in sys.argv[2:]:
        job = Job()
        cases[name](job)
        found[name] = job.found()
    return found


work(find)
