"""Trains under `spike-trap` on the loss where the loss of one rank alone is a spike."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from distributed.batches import data, make, shard, whole
from ranks import Json
from small import attach, fields_of, sgd
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon

STEPS = 8
# In this step the loss of rank 1 is a spike.
FAULT = 4
SETUPS = ("DDP", "accumulated", "FSDP2", "warn", "raise", "observe")


def rule(**options: Any) -> Json:
    return {
        "id": "spikes", "action": "spike-trap", "tensors": "loss", "tensor": "value",
        "above": {"sigmas": 20, "warmup": 3}, "then": "skip-step", **options,
    }  # fmt: skip


def train(setup: str) -> Json:
    model: Any = make()
    called: Any = shard(model) if setup == "FSDP2" else DistributedDataParallel(model)
    optimizer = sgd(model, 0.01)
    options = {"then": setup} if setup in ("warn", "raise") else {}
    mode: Any = "observe" if setup == "observe" else "act"
    parts = 2 if setup == "accumulated" else 1
    weights: list[Any] = []
    raised: Json = {}
    with attach(called, rule(**options), optimizer=optimizer, mode=mode) as session:
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(parts):
                if setup == "accumulated":
                    called.require_backward_grad_sync = part == parts - 1
                x = data(step % 2).chunk(2)[dist.get_rank()].chunk(parts)[part]
                loss = called(x).square().mean() / parts
                if step == FAULT and dist.get_rank() == 1:
                    # The gradient stays as it is, so nothing else tells.
                    loss = loss + 100 / parts
                loss.backward()
            try:
                optimizer.step()
            except gradsurgeon.GradientSpikeError as error:
                raised = {"rank": error.rank, "name": error.name, "step": error.step}
                break
            weights.append([whole(param) for param in model.parameters()])
        learnt = session.state_dict()["rules"]["spikes"]["statistics"][0]["kept"][:, 0]
        return {
            "weights": weights,
            "raised": raised,
            "events": fields_of(session, "kind", "step", "name", "message"),
            "learnt": learnt.tolist(),
        }


def without_a_session() -> Json:
    """Let rank 1 have no session: rank 0 tells, decides alone, and waits for nobody."""
    model = make()
    called = DistributedDataParallel(model)
    optimizer = sgd(model, 0.01)
    session = (
        attach(called, rule(then="warn"), optimizer=optimizer) if not dist.get_rank() else None
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = called(data(step % 2).chunk(2)[dist.get_rank()]).square().mean()
        if step == FAULT:
            loss = loss + 100
        loss.backward()
        optimizer.step()
    events = fields_of(session, "kind", "step") if session is not None else []
    return {"events": events, "weights": [whole(param) for param in model.parameters()]}


def main() -> Json:
    logging.getLogger("gradsurgeon").setLevel(logging.CRITICAL)
    return {**{setup: train(setup) for setup in SETUPS}, "alone": without_a_session()}


if __name__ == "__main__":
    work(main)
