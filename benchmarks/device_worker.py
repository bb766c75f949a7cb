"""Counts what rules ask of a device, in a process of its own: the device made of Python stays registered.

Is given a file, and as JSON pairs of the sizes of models and the names of cases; writes the rows to the file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.device_counts import BARE, Mlp, Size, cases, label, settled, task
from benchmarks.operations import counting
from benchmarks.overhead import Row
from benchmarks.toy_device import Factories, Toy, move
from gradsurgeon.tensors import _torch


def _place(model: Mlp, features: Tensor) -> Tensor:
    move(model)
    return Toy(features)


def _send(parts: Sequence[Tensor]) -> _torch.Arrival:
    """Send without waiting, as it is done on CUDA and on no other device."""
    whole = torch.cat(list(parts))
    return _torch.Arrival(parts, whole.to("cpu", non_blocking=True))


def rows(sizes: Sequence[Size], names: Collection[str]) -> Iterator[Row]:
    """Yield the counts of the bare step of each model, and what each case adds to it."""
    for size in sizes:
        base: dict[str, int] = {}
        for case in cases():
            if case.name not in (BARE, *names):
                continue
            made = task(size, _place)
            step, attached = settled(made, case)
            with counting() as found:
                step()
            attached.detach()
            more = {key: count - base.get(key, 0) for key, count in found.to_dict().items()}
            base = base or more
            row = {"params": size[0], "dtypes": label(size[1]), "case": case.name}
            yield row | {"gradient_bytes": sum(param.nbytes for param in made.params)} | more


def main() -> None:
    """Count."""
    _torch.send = _send
    with Factories():  # type: ignore[no-untyped-call] # torch has no types there
        found = [row for sizes, names in json.loads(sys.argv[2]) for row in rows(sizes, names)]
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    # The thread of the device outlives Python, which torch answers with an abort.
    os._exit(0)


if __name__ == "__main__":
    main()
