"""Parts of the suite that count in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.overhead import Row


def rows(command: Sequence[str], *arguments: str, timeout: float) -> list[Row]:
    """Return the rows that a worker writes to the file it is given.

    Args:
        command: arguments of Python that start it.
        arguments: what it is given after the file.
        timeout: seconds after which it counts as hanging.

    Raises:
        RuntimeError: it did not end well; the end of what it wrote to stderr.
    """
    with tempfile.TemporaryDirectory(prefix="gradsurgeon-benchmark-") as folder:
        out = Path(folder) / "counts.json"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, *command, str(out), *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} did not end well:\n{done.stderr[-4000:]}")
        found: list[Row] = json.loads(out.read_text(encoding="utf-8"))
    return found
