"""The table of set-ups in `rules/README.md`, made of the tests that back it.

A test says by `@pytest.mark.cell(SETUP, *POINTS)` which cells it backs. Where rules act there as they
do in one process, that is all; else it says how, or why they are refused:
`differs="..."`, `refused="..."`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

POINTS = ("backward", "accumulated", "step", "modules")
SETUPS = (
    "one process",
    "one process, fused optimizer",
    "accumulation",
    "GradScaler",
    "GradScaler, fused optimizer",
    "GradScaler and accumulation",
    "activation checkpointing, not reentrant",
    "activation checkpointing, reentrant",
    "DDP",
    "DDP under `Join`",
    "FSDP2 (`fully_shard`)",
    "tensor parallel",
    "FSDP1 (`FullyShardedDataParallel`)",
    "`ZeroRedundancyOptimizer`",
    "an optimizer per parameter, stepped inside backward",
    "updates written by hand",
    "closures (LBFGS)",
    "`torch.compile`, rules first",
    "`torch.compile`, rules after the first call",
    "compiled autograd",
    "CUDA graphs",
    "`torch.autograd.grad`, `torch.func`",
    "Hugging Face `Trainer`",
    "`accelerate`",
    "Lightning, automatic optimization",
    "Lightning, manual optimization",
)
_OUT = "CELLS_OF_THE_TABLE"
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table and one test that backs it."""

    setup: str
    point: str
    test: str
    differs: str = ""
    refused: str = ""
    slow: bool = False


def cells_of(items: Iterable[pytest.Item]) -> list[Cell]:
    """Return the cells that collected tests back."""
    found: dict[Cell, None] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        slow = item.get_closest_marker("slow") is not None
        for mark in item.iter_markers("cell"):
            setup, *points = mark.args
            if setup not in SETUPS or not set(points) <= set(POINTS) or not points:
                raise pytest.UsageError(f"{test}: there is no cell {mark.args}")
            for point in points:
                found[Cell(setup, point, test, **mark.kwargs, slow=slow)] = None
    return list(found)


_KEPT: list[pytest.Item] = []


def keep(items: Iterable[pytest.Item]) -> None:
    """Keep what this process has collected, so that `collected` need not do it again."""
    _KEPT[:] = items


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the cells down where `collected` asks for them."""
    if out := os.environ.get(_OUT):
        text = json.dumps([asdict(cell) for cell in cells_of(session.items)])
        Path(out).write_text(text, encoding="utf-8")


def collected() -> list[Cell]:
    """Return the cells that all tests back, collected in a process of their own if not in this one."""
    # The others take as long again.
    files = [
        file for file in sorted((_ROOT / "tests").rglob("test_*.py")) if ".cell(" in _text(file)
    ]
    if {item.path for item in _KEPT}.issuperset(files):
        return cells_of(_KEPT)
    with TemporaryDirectory() as folder:
        out = Path(folder) / "cells.json"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "setups"]
        done = subprocess.run(
            [*command, *map(str, files)],
            cwd=_ROOT,
            env={**os.environ, _OUT: str(out), "PYTHONPATH": _paths()},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
        return [Cell(**row) for row in json.loads(out.read_text(encoding="utf-8"))]


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _paths() -> str:
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(_ROOT / "tests"), *([given] if given else [])])


def table(cells: list[Cell]) -> str:
    """Return the table as Markdown, with its notes and the tests behind every row."""
    notes: dict[str, int] = {}
    lines = [
        "| set-up | `at: backward` | `at: accumulated` | `at: step` | modules and tags |",
        "|---|---|---|---|---|",
    ]
    for setup in SETUPS:
        row = [_cell([c for c in cells if (c.setup, c.point) == (setup, p)], notes) for p in POINTS]
        lines.append(f"| {setup} | {' | '.join(row)} |")
    lines.append("")
    lines += [f"{number}. {note}" for note, number in notes.items()]
    lines += ["", "<details>", "<summary>The tests that back each row</summary>", ""]
    for setup in SETUPS:
        tests = dict.fromkeys(cell.test for cell in cells if cell.setup == setup)
        lines.append(f"* {setup}: {', '.join(f'`{test}`' for test in tests)}")
    lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def _cell(cells: list[Cell], notes: dict[str, int]) -> str:
    if not cells:
        return "not tested"
    words = []
    if any(not cell.differs and not cell.refused for cell in cells):
        words.append("acts")
    for cell in cells:
        note = cell.differs or cell.refused
        if note:
            number = notes.setdefault(note, len(notes) + 1)
            words.append(f"{'refused' if cell.refused else 'acts differently'} ({number})")
    return ", ".join(dict.fromkeys(words))
