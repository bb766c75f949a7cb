"""Runs a worker on real ranks under gloo and returns what each of them wrote down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bounds import TIMEOUT

# What a test tells of itself goes with its report, from the process it ran in to the one that prints.
FINAL_WEIGHTS = "final weights"


def torchrun(ranks: int = 2) -> tuple[str, ...]:
    """Return what comes after `python` to start a script on some ranks."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def run_ranks(worker: Path, out: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """Run a worker on several ranks.

    Args:
        worker: a script that ends in `worker.work`.
        out: the path that it writes to, with ``.<rank>`` appended.
        ranks: how many.
    """
    # Where it finds `worker`.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *torchrun(ranks), str(worker), str(out)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
