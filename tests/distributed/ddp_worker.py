"""Trains one small model on two ranks under DDP; each rank writes down what it saw."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from distributed.batches import data
from ranks import Json
from small import attach, fields_of, rule_file, rules_of_workers, sgd, tanh_net
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon

STEPS = 4
FAULT = 2
RULES: Json = rule_file(
    {"id": "bound", "action": "clamp", "params": "*", "at": "step", "min": -0.02, "max": 0.02},
    {"id": "short", "action": "clip-norm", "params": "*", "max_norm": 0.05, "per": "rule"},
    {"id": "norms", "action": "norm-log", "params": "*"},
    {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"},
)


# A rule, and the parameters that DDP is told to leave alone.
WORDS: dict[str, tuple[Json, list[str]]] = rules_of_workers("on each rank")
NORMS: dict[str, tuple[Json, list[str]]] = rules_of_workers("over several")


def make() -> nn.Module:
    """Return the model with the same weights each time."""
    torch.manual_seed(0)
    return tanh_net(4, 6, 2)


def run(*, ranks: int, rank: int, when: str, options: Json, parts: int = 1) -> Any:
    """Train, and return what was recorded; in one step the data of the last rank has a NaN."""
    model = make()
    wrapped: Any = model
    session = gradsurgeon.apply(model, RULES) if when == "before" else None
    if ranks > 1:
        wrapped = DistributedDataParallel(model, **options)
    if session is None:
        session = gradsurgeon.apply(wrapped, RULES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = data(step).chunk(ranks)[rank].chunk(parts)
        for number, part in enumerate(mine):
            last = number == len(mine) - 1
            with nullcontext() if last or ranks == 1 else wrapped.no_sync():
                loss = wrapped(part).square().mean() / len(mine)
            if step == FAULT and rank == ranks - 1 and last:
                loss = loss * float("nan")
            loss.backward()
        optimizer.step()
    session.remove()
    return session.history("0.weight", rule="norms")


def words(kind: str) -> Json:
    """Train under one rule, and return what was said of it."""
    rule, left_alone = (WORDS | NORMS)[kind]
    model = make()
    called: Any = model
    if left_alone:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left_alone)
    if "one process" not in kind:
        called = DistributedDataParallel(model)
    parts = 2 if "no_sync" in kind else 1
    optimizer = sgd(model, 0.05)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attach(called, rule) as session:
            for step in range(STEPS):
                optimizer.zero_grad()
                mine = data(step).chunk(2)[dist.get_rank()].chunk(parts)
                for number, part in enumerate(mine):
                    with called.no_sync() if number < parts - 1 else nullcontext():
                        called(part).square().mean().backward()
                optimizer.step()
    ours = [one for one in caught if issubclass(one.category, gradsurgeon.GradSurgeonWarning)]
    return {
        "events": fields_of(session, "kind", "rule", "step", "message"),
        "warnings": [str(one.message) for one in ours],
    }


def main() -> Json:
    """Run every set-up."""
    rank = dist.get_rank()
    setups: dict[str, Json] = {
        "before": {"when": "before", "options": {}},
        "after": {"when": "after", "options": {}},
        "bucket views": {"when": "before", "options": {"gradient_as_bucket_view": True}},
        "static graph": {"when": "before", "options": {"static_graph": True}},
        "unused": {"when": "after", "options": {"find_unused_parameters": True}},
    }
    found = {name: run(ranks=2, rank=rank, **setup) for name, setup in setups.items()}
    found["no_sync"] = run(ranks=2, rank=rank, when="before", options={}, parts=2)
    found["one process"] = run(ranks=1, rank=0, when="before", options={})
    found |= {f"words: {kind}": words(kind) for kind in WORDS | NORMS}
    return found


if __name__ == "__main__":
    work(main)
