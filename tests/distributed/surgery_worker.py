"""Edits of rows, elements, groups, weights and updates on models that two ranks share, and in one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed.batches import Block, data, divide, mine, shard, whole
from ranks import Json
from small import messages, sgd, take_step
from surgery import ACTIONS, OF_ROWS, make, rules_in, train
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon


def weights(model: nn.Module) -> Json:
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}


def sequences(step: int) -> Tensor:
    """Return the whole batch of a model that tensor parallelism divides."""
    return torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))


def my_sequences(step: int) -> Tensor:
    return sequences(step).chunk(2, dim=1)[dist.get_rank()]


def edited(action: str) -> Json:
    """Train under one rule; return the weights of one process, and of what ranks share."""
    found: Json = {}
    folder = Path(tempfile.mkdtemp())
    rules = rules_in(folder, action, make())
    cases: list[tuple[str, nn.Module, Any]] = [("one process", make(), data)]
    cases += [("DDP", DistributedDataParallel(make()), mine), ("FSDP2", shard(make()), mine)]
    for case, called, batch in cases:
        model = getattr(called, "module", called)
        train(model, rules, batch, called=called)
        found[case] = weights(model)
    train(plain := make(), None, data)
    found["no rules"] = weights(plain)
    rules = rules_in(folder, action, Block(), "up.weight" if action in OF_ROWS else "*.weight")
    blocks: tuple[tuple[str, nn.Module, Path | None, Any], ...] = (
        ("one block", Block(), rules, sequences),
        ("tensor parallel", divide(Block()), rules, my_sequences),
        ("no rules on a block", Block(), None, sequences),
    )
    for case, block, given, batch in blocks:
        train(block, given, batch, divisor=64)
        found[case] = weights(block)
    return found


def partly() -> Json:
    """Record the norm of all gradients, where one layer is sharded and the others are whole."""
    rule = {"id": "all", "action": "norm-log", "params": "*", "per": "rule"}
    rules = {"version": 1, "rules": [rule]}
    found: Json = {}
    for case in ("whole", "partly"):
        model = make()
        if case == "partly":
            fully_shard(model[0])
        optimizer = sgd(model)
        with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
            for step in range(3):
                take_step(optimizer, model(data(step)).square().mean())
            found[case] = session.history("all")
            found[f"{case} told"] = messages(session, "notice")
    return found


def divided_rows() -> Json:
    """Edit rows of parameters that two ranks hold half of."""
    found: Json = {}
    for action in OF_ROWS:
        rules = rules_in(Path(tempfile.mkdtemp()), action, Block(), "down.weight")
        try:
            train(divide(Block()), rules, my_sequences)
        except gradsurgeon.BindError as error:
            (found[action],) = error.complaints
    rules = rules_in(Path(tempfile.mkdtemp()), OF_ROWS[0], make(), "0.*")
    try:
        train(shard(make()), rules, mine)
    except gradsurgeon.BindError as error:
        (found["vector"],) = error.complaints
    return found


def main() -> Json:
    found: Json = {action: edited(action) for action in ACTIONS}
    found["partly"] = partly()
    found["divided rows"] = divided_rows()
    return found


if __name__ == "__main__":
    work(main)
