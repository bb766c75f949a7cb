"""One rank: counts the collectives of a step with and without rules; the first rank writes them down."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.profiler import ProfilerActivity, profile

import gradsurgeon
from benchmarks import rule_sets

# What the backends call their collectives in a profile.
_BACKENDS = ("gloo:", "nccl:")
_BYTES = {
    "float": 4,
    "double": 8,
    "int": 4,
    "long": 8,
    "long int": 8,
    "bool": 1,
    "unsigned char": 1,
}
_LAYERS = (4, 16)
_WIDTH = 8
_RULES = (rule_sets.OBSERVE, rule_sets.CLIP_IDLE, rule_sets.CLIP_BITES)


def ddp(model: nn.Sequential) -> nn.Module:
    """Replicate: gradients are averaged."""
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: nn.Sequential) -> nn.Module:
    """Shard every layer over the ranks."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 # slow, and only for this

    for layer in model:
        fully_shard(layer)
    fully_shard(model)  # in place
    return model


def step_of(wrap: Callable[[nn.Sequential], nn.Module], layers: int) -> tuple[Any, ...]:
    """Return a model as its ranks have it, its optimizer, and one training step."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    features = torch.randn(2, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(features).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def talk(step: Callable[[], None]) -> tuple[int, int]:
    """Return how many collectives a step calls, and how many bytes this rank gives to them."""
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step()
    events = seen.profiler.kineto_results.events()
    own = [event for event in events if event.name().startswith(_BACKENDS)]
    return len(own), sum(_given(event) for event in own)


def _given(event: Any) -> int:
    pairs = zip(event.shapes(), event.dtypes(), strict=True)
    return sum(math.prod(shape) * _BYTES[dtype] for shape, dtype in pairs if dtype)


def rows() -> Iterator[dict[str, Any]]:
    """Yield what each set of rules adds to a step under each wrapper."""
    known = rule_sets.together()
    for wrap in (ddp, fsdp2):
        for layers in _LAYERS:
            calls, size = talk(step_of(wrap, layers)[2])
            row = {"wrapper": wrap.__name__, "params": 2 * layers}
            yield row | {"case": "bare step", "collectives": calls, "bytes": size}
            for title in _RULES:
                model, optimizer, step = step_of(wrap, layers)
                rules = {"version": 1, "rules": rule_sets.numbered(known[title])}
                with gradsurgeon.apply(model, rules, optimizer=optimizer):
                    more, larger = talk(step)
                yield row | {"case": title, "collectives": more - calls, "bytes": larger - size}


def main() -> None:
    """Count, and write the counts to the path given."""
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    found = list(rows())
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()
    # A thread of gloo that lets go of its last tensor while Python ends would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
