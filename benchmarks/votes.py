"""What it costs ranks to decide alike: a vote after each backward pass, and a look at the decision before the update."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from benchmarks import workers
from benchmarks.overhead import Row
from gradsurgeon import _job_store

GROUP = "votes"
WORLDS = (2, 4, 8)
# Ranks that nobody has here: their requests go to one store, one after another.
SIMULATED = (64, 1000)
PER_HOST = 8
_TIMEOUT = 300


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per world: real ones, then those whose requests are simulated, rank by rank and host by host."""
    del device
    for world in (2,) if quick else WORLDS:
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world))
        command = (*launch, "-m", "benchmarks.vote_worker")
        for row in workers.rows(command, "real", timeout=_TIMEOUT):
            yield {"group": GROUP, "world": world, "how": "real"} | row
    for world in () if quick else SIMULATED:
        for how, voters in (("ranks", world), ("hosts", world // PER_HOST)):
            yield {"group": GROUP, "world": world, "how": how} | _simulated(voters)


def _simulated(voters: int) -> Row:
    server = _job_store.server(None, timedelta(seconds=60))
    command = ("-m", "benchmarks.vote_worker")
    numbers = map(str, (server.port, voters, 50))
    (row,) = workers.rows(command, "simulated", *numbers, timeout=_TIMEOUT)
    return row
