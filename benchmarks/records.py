"""How long runs are kept: bytes on disk, and what it takes to read them again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gradsurgeon
from benchmarks.cases import Attached, step_of
from benchmarks.measure import rounded
from benchmarks.overhead import Row
from benchmarks.workloads import given

GROUP = "records"
LENGTHS = (10_000, 1_000_000)
QUICK = (10_000,)
# Few and small: the steps are not what is measured here.
_TENSORS, _SIZE = 4, 8


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per length of a run."""
    for steps in QUICK if quick else LENGTHS:
        with tempfile.TemporaryDirectory(prefix="gradsurgeon-benchmark-") as folder:
            yield {"group": GROUP, "steps": steps, "tensors": _TENSORS} | written(
                Path(folder) / "run", steps, device
            )


def written(path: Path, steps: int, device: str) -> Row:
    """Return what a run of so many steps leaves, with one norm per tensor and step."""
    task = given(_TENSORS, _SIZE)(device)
    rules = {"version": 1, "rules": [{"id": "norms", "action": "norm-log", "params": "*"}]}
    step = step_of(task, Attached())
    with gradsurgeon.apply(task.model, rules, optimizer=task.optimizer, record=path):
        begin = time.process_time()
        for _ in range(steps):
            step()
        trained = time.process_time() - begin
    size = sum(file.stat().st_size for file in path.iterdir())
    begin = time.process_time()
    with gradsurgeon.open_run(path) as run:
        opened = time.process_time()
        rows = len(run.history(run.params[0]))
        read = time.process_time()
    if rows != steps:
        raise RuntimeError(f"{steps:,} steps were recorded and {rows:,} read again")
    return {
        "bytes": size,
        "train_s": rounded(trained),
        "open_s": rounded(opened - begin),
        "history_s": rounded(read - opened),
    }
