"""Casts and reads votes: those of real ranks, or as many requests as there would be with more of them."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from gradsurgeon import _job_store
from gradsurgeon.distributed.votes import Voter

_PASSES = 200
# What a step takes besides, in seconds: ranks come to their update together.
_STEP = 0.002
# Connections by which simulated ranks ask side by side.
_AT_ONCE = 8


def main() -> None:
    """Do what the arguments say."""
    out, how, *rest = sys.argv[1:]
    found = real() if how == "real" else simulated(*map(int, rest))
    if int(os.environ.get("RANK", "0")) == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")


def real() -> list[dict[str, Any]]:
    """Return how long a rank takes to cast a vote, and to read the decision a little later: medians, in microseconds."""
    distributed.init_process_group("gloo")
    world = distributed.get_world_size()
    voter = Voter("benchmark", range(world), ["here"] * world, 60.0, print)
    cast, read = [], []
    for _ in range(_PASSES):
        distributed.barrier()
        start = time.perf_counter()
        number = voter.cast(())
        cast.append(time.perf_counter() - start)
        time.sleep(_STEP)
        start = time.perf_counter()
        voter.decision(number)
        read.append(time.perf_counter() - start)
    distributed.barrier()
    voter.close()
    return [{"cast_us": _median(cast), "read_us": _median(read)}]


def simulated(port: int, ranks: int, passes: int) -> list[dict[str, Any]]:
    """Return how long the store takes for the votes of a pass and for the looks at them, in microseconds."""
    stores = [_job_store.server(port, timedelta(seconds=60)) for _ in range(_AT_ONCE)]
    shares = [len(range(place, ranks, _AT_ONCE)) for place in range(_AT_ONCE)]
    took = []

    def ask(store: Any, key: str, amount: int, times: int) -> None:
        for _ in range(times):
            store.add(key, amount)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for number in range(passes):
            start = time.perf_counter()
            for amount in (1, 0):
                keys, amounts = [str(number)] * _AT_ONCE, [amount] * _AT_ONCE
                list(pool.map(ask, stores, keys, amounts, shares))
            took.append(time.perf_counter() - start)
    return [{"pass_us": _median(took)}]


def _median(times: list[float]) -> float:
    return 1e6 * statistics.median(times)


if __name__ == "__main__":
    main()
