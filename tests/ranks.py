"""Runs a worker on real ranks under gloo and returns what each of them wrote down."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forks
from bounds import TIMEOUT

# What a test tells of itself goes with its report, from the process it ran in to the one that prints.
FINAL_WEIGHTS = "final weights"
# What JSON can hold: a rule, or what a rank has found.
Json = dict[str, Any]
Ranks = list[Json]
Weights = list[list[float]]


def torchrun(ranks: int = 2) -> tuple[str, ...]:
    """Return what comes after `python` to start a script on some ranks."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def run_ranks(worker: Path, out: Path, ranks: int = 2, words: Sequence[str] = ()) -> Ranks:
    """Run a worker on several ranks, and return what each of them has written down.

    Args:
        worker: a script that ends in `worker.work`.
        out: the path that it writes to, with ``.<rank>`` appended.
        ranks: how many.
        words: what it gets on its command line besides.
    """
    started = start_ranks(worker, out, ranks, words)
    try:
        for done in (fork.wait(TIMEOUT) for fork in started):
            assert done.returncode == 0, done.stderr.decode()[-6000:]
    finally:
        for fork in started:
            fork.kill()
    return [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]


def start_ranks(worker: Path, out: Path, ranks: int, words: Sequence[str]) -> list[forks.Fork]:
    """Start a worker on several ranks."""
    return start_words([str(worker), str(out), *words], Path.cwd(), ranks)


def start_words(words: Sequence[str], cwd: Path, ranks: int) -> list[forks.Fork]:
    """Start what comes after `python` on several ranks, in forks that have the environment of torchrun."""
    # Where it finds `worker`.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    shared = {
        "PYTHONPATH": path,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    return [
        forks.start(
            words,
            cwd=cwd,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


def largest_difference(left: Weights, right: Weights) -> float:
    """Return the largest difference between two numbers in the same place; infinity if one is not finite."""
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    gaps = [abs(a - b) for a, b in pairs]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


class Job:
    """Commands on ranks, in forks, with all that torchrun does for them: it hosts their store, too.

    Args:
        commands: what comes after `python`, for each rank.
        cwd: the working directory.
        env: the environment, without what is about ranks.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], *, cwd: Path, env: Mapping[str, str]
    ) -> None:
        import torch

        # A port that is only free now may be taken when the first rank wants it.
        distributed: Any = torch.distributed
        self._store = distributed.TCPStore(
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
        )
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(len(commands)),
            "LOCAL_WORLD_SIZE": str(len(commands)),
        }
        self._forks = [
            forks.start(
                words, cwd=cwd, env={**env, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank, words in enumerate(commands)
        ]

    def wait(self) -> list[subprocess.CompletedProcess[bytes]]:
        """Return how each rank has ended; kill what is left of them at the timeout."""
        try:
            return [fork.wait(TIMEOUT) for fork in self._forks]
        finally:
            for fork in self._forks:
                fork.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
