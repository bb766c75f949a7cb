"""What rules add to the talk between ranks: collectives and bytes per step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machine import ROOT
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
    with tempfile.TemporaryDirectory(prefix="gradsurgeon-benchmark-") as folder:
        out = Path(folder) / "counts.json"
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, *launch, "-m", "benchmarks.rank_worker", str(out)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{world} ranks did not end well:\n{done.stderr[-4000:]}")
        found: list[Row] = json.loads(out.read_text(encoding="utf-8"))
    return found
