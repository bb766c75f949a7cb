"""What the page of a run costs: a million steps of five hundred parameters, as `report --html` draws them."""

from __future__ import annotations

import math
import random
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import rounded
from benchmarks.overhead import Row
from gradsurgeon.report.web_page import page_data, web_page
from gradsurgeon.store import Key
from gradsurgeon.store.run import open_run
from gradsurgeon.store.writer import RunWriter

GROUP = "pages"
LENGTHS = (10_000, 1_000_000)
QUICK = (10_000,)
TENSORS = 500
# So many different rows: to make a million of them would take longer than to write them.
_ROWS = 256


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per length of a run."""
    del device  # a page is drawn from files
    for steps in QUICK if quick else LENGTHS:
        with tempfile.TemporaryDirectory(prefix="gradsurgeon-benchmark-") as folder:
            run = Path(folder) / "run"
            _write(run, steps)
            begin = time.process_time()
            with open_run(run) as opened:
                page = web_page([page_data(opened)])
            drawn = time.process_time() - begin
        yield {
            "group": GROUP,
            "steps": steps,
            "tensors": TENSORS,
            "bytes": len(page.encode()),
            "seconds": rounded(drawn),
        }


def _write(path: Path, steps: int) -> None:
    """Write norms that differ by layer, fall in the course of the run, and vary from step to step."""
    names = tuple(
        f"layers.{layer}.{part}.weight"
        for layer in range(TENSORS // 10)
        for part in ("q", "k", "v", "o", "up", "gate", "down", "norm1", "norm2", "scale")
    )
    plan = {"rules": [{"id": "norms", "action": "norm-log", "params": list(names)}]}
    model = {"origin": "Net", "params": [{"name": name, "aliases": []} for name in names]}
    rules = {"file": "rules.yaml", "text": ""}
    key = Key("norms", "l2", "accumulated", names)
    draw = random.Random(0)  # as test data
    writer = RunWriter(path, rank=0, meta={"rules": rules, "model": model, "plan": plan})
    for step in range(steps):
        if step % max(1, steps // _ROWS) == 0:
            # Each part of the run has rows of its own.
            fallen = math.log(1 + 100 * step / steps)
            rows = [
                array(
                    "f",
                    (
                        math.exp(draw.gauss(-tensor / 100 - fallen, 0.4))
                        for tensor in range(TENSORS)
                    ),
                )
                for _ in range(8)
            ]
        writer.add(key, step, draw.choice(rows).tobytes(), frozenset())
    writer.close()
