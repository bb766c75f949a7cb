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
    return _started([words] * ranks, cwd, {**os.environ, "PYTHONPATH": path}, free_port())


def _started(
    commands: Sequence[Sequence[str]], cwd: Path, env: Mapping[str, str], port: int
) -> list[forks.Fork]:
    """Start what comes after `python` on each rank."""
    count = str(len(commands))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    started = []
    for rank, words in enumerate(commands):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(forks.start(words, cwd=cwd, env={**env, **shared, **own}))
    return started


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
        shared = {**env, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        self._forks = _started(commands, cwd, shared, self._store.port)

    def wait(self) -> list[subprocess.CompletedProcess[bytes]]:
        """Return how each rank has ended; kill what is left of them at the timeout."""
        try:
            return [fork.wait(TIMEOUT) for fork in self._forks]
        finally:
            for fork in self._forks:
                fork.kill()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
