"""Four ranks in two groups: stages of a pipeline and models of their own; each writes down what came of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import Json
from small import fields_of, sgd, tanh_net
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon
from gradsurgeon.distributed import session_discovery

STEPS = 4
FAULT = 1


def apply(net: nn.Module, *rules: Json) -> tuple[Any, str]:
    """Put rules on; return the session, and what was refused."""
    try:
        return gradsurgeon.apply(net, {"version": 1, "rules": list(rules)}), ""
    except gradsurgeon.BindError as error:
        return None, str(error)


def of_stage(rank: int) -> nn.Sequential:
    """Return the part of a model that a rank has: two ranks have the first stage, two the second."""
    net = nn.Sequential()
    net.add_module("first" if rank < 2 else "second", nn.Linear(4, 4))
    return net


def stages(**options: Any) -> Json:
    """Apply a rule for the first stage on all ranks."""
    rule = {"id": "calm", "action": "scale", "at": "step", "factor": 0.5, **options}
    session, refused = apply(of_stage(dist.get_rank()), rule)
    events = []
    if session is not None:
        events = fields_of(session, "kind", "rule", "message")
        session.remove()
    dist.barrier()
    return {"refused": refused, "events": events}


def asked_by_one() -> Json:
    """Apply a rule that matches nothing on rank 0 alone: nobody answers, however long it waits."""
    session_discovery.LIMIT = 0.5
    refused = ""
    if dist.get_rank() == 0:
        _, refused = apply(of_stage(0), {"id": "lost", "action": "zero", "params": "third.*"})
    dist.barrier()
    return {"refused": refused}


def groups() -> Json:
    """Train two models, each on a group of its own; rank 1 spoils a gradient of the first."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    torch.manual_seed(0)
    net = tanh_net(4, 4, 2)
    called = DistributedDataParallel(net, process_group=pair)
    optimizer = sgd(net)
    session, _ = apply(
        net, {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
    )
    weights = []
    for step in range(STEPS):
        optimizer.zero_grad()
        out = called(torch.full((2, 4), 1.0 + dist.get_rank()))
        if step == FAULT and dist.get_rank() == 1:
            out = out * float("nan")
        out.square().mean().backward()
        optimizer.step()
        weights.append([float(one) for param in net.parameters() for one in param.flatten()])
    events = fields_of(session, "kind", "step")
    session.remove()
    return {"weights": weights, "events": events}


def main() -> Json:
    """Run every part."""
    warnings.simplefilter("ignore")
    parts: dict[str, Callable[[], Json]] = {
        "elsewhere": lambda: stages(params="first.*"),
        "nowhere": lambda: stages(params="frist.*"),
        "expected": lambda: stages(params="*", expect={"params": 4}),
        "not expected": lambda: stages(params="*", expect={"params": 2}),
        "groups": groups,
        "asked by one": asked_by_one,
    }
    return {name: part() for name, part in parts.items()}


if __name__ == "__main__":
    work(main)
