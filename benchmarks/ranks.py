"""What rules add to the talk between ranks: collectives and bytes per step."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import workers
from benchmarks.overhead import Row

GROUP = "ranks"
WORLDS = (1, 2, 4)
_TIMEOUT = 300


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per world, wrapper, model and rules.

    Counts do not depend on the device: ranks are processes on the host, under gloo.
    """
    del device
    for world in (2,) if quick else WORLDS:
        for row in counted(world):
            yield {"group": GROUP, "world": world} | row


def counted(world: int) -> list[Row]:
    """Run a worker on some ranks; return what the first of them has counted."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world))
    return workers.rows((*launch, "-m", "benchmarks.rank_worker"), timeout=_TIMEOUT)
