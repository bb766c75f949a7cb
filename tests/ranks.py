"""Runs a worker on two real ranks under gloo and returns what each of them wrote down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# What a test tells of itself goes with its report, from the process it ran in to the one that prints.
FINAL_WEIGHTS = "final weights"
_LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_ranks(worker: Path, out: Path, *args: str) -> list[dict[str, Any]]:
    """Run a worker on two ranks.

    Args:
        worker: a script that takes a path and writes JSON to that path with ``.<rank>`` appended.
        out: the path.
        args: passed on to the script after the path.
    """
    done = subprocess.run(
        [sys.executable, *_LAUNCH, str(worker), str(out), *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in (0, 1)]
