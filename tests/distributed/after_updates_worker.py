"""Judges updates, and records what optimizers keep, where two ranks share a model."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from distributed.batches import data, make, shard, whole
from ranks import Json
from running_bounds import clip_updates
from small import attach, fields_of, weights_of
from torch.nn.parallel import DistributedDataParallel
from worker import work

FACTORS = (1.0, 1.2, 0.9, 30.0, 1.0, 20.0, 1.1)
BOUND = 0.02
KINDS = ("one process", "DDP", "FSDP2")
STATS = ("l2", "mean", "max")


def spikes(per: str) -> Json:
    return {
        "id": "spikes", "action": "spike-trap", "params": "*", "tensor": "update",
        "above": {"norm": BOUND}, "per": per,
    }  # fmt: skip


def kept(name: str) -> Json:
    return {
        "id": name.replace("_", "-"), "action": "norm-log", "params": "*", "tensor": f"state.{name}",
        "stats": list(STATS),
    }  # fmt: skip


def train(kind: str, *rules: Json) -> Json:
    """Train on the whole batch of each step, of which each rank has its share."""
    model: Any = make()
    called = model
    if kind == "DDP":
        called = DistributedDataParallel(model)
    elif kind == "FSDP2":
        called = shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.5, 0.5))
    ranks, rank = (1, 0) if kind == "one process" else (2, dist.get_rank())
    with attach(called, *rules, optimizer=optimizer) as session:
        for step, factor in enumerate(FACTORS):
            optimizer.zero_grad()
            (called(data(step).chunk(ranks)[rank]).square().mean() * factor).backward()
            optimizer.step()
    records = {}
    for name, _ in model.named_parameters():
        for rule in rules:
            # The lowest rank that has a part of a parameter records it.
            if rule["action"] == "norm-log" and not dist.get_rank():
                for stat in STATS:
                    rows = session.history(name, stat=stat, rule=rule["id"])
                    records[f"{rule['id']} {stat} {name}"] = rows
    return {
        "weights": [whole(param) for param in model.parameters()],
        "events": fields_of(session, "kind", "step", "name"),
        "records": records,
    }


def by_hand(per: str) -> Json:
    """Clip updates by hand, in one process."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.5, 0.5))
    for step, factor in enumerate(FACTORS):
        before = weights_of(model)
        optimizer.zero_grad()
        (model(data(step)).square().mean() * factor).backward()
        optimizer.step()
        clip_updates(list(model.parameters()), before, BOUND, per)
    return {"weights": [whole(param) for param in model.parameters()]}


def main() -> Json:
    logging.getLogger("gradsurgeon").setLevel(logging.CRITICAL)
    found: Json = {}
    for per in ("rule", "parameter"):
        found[f"by hand, {per}"] = by_hand(per)
        for kind in KINDS:
            found[f"{kind}, {per}"] = train(kind, spikes(per))
    for kind in KINDS:
        found[f"{kind}, kept"] = train(kind, kept("exp_avg_sq"), kept("step"))
    return found


if __name__ == "__main__":
    work(main)
