"""The table of set-ups in `rules/guide/setups.md`, made of the tests that back it.

A test says by `@pytest.mark.cell(SETUP, *POINTS)` which cells it backs. Where rules act there as they
do in one process, that is all; else it says how, or why they are refused:
`differs="..."`, `refused="..."`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    "DeepSpeed, ZeRO 0",
    "DeepSpeed, ZeRO 1",
    "DeepSpeed, ZeRO 2",
    "DeepSpeed, ZeRO 3",
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


def collected() -> list[Cell]:
    """Return the cells that the tests back. The marks are read as they are written; no test is imported."""
    found: dict[Cell, None] = {}
    for file in sorted((_ROOT / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "mark.cell(" in text:
            tree = ast.parse(text)
            marks = list(marks_of(tree.body, file.relative_to(_ROOT).as_posix()))
            if len(marks) != sum(map(_is_cell, ast.walk(tree))):
                raise ValueError(f"{file}: only a decorator of a test may be `pytest.mark.cell`")
            found.update(dict.fromkeys(cell for mark in marks for cell in cells_of(*mark)))
    return list(found)


def marks_of(
    body: Sequence[ast.stmt], name: str, *, slow: bool = False
) -> Iterator[tuple[ast.Call, str, bool]]:
    """Return the marks of cells in a file or a class, with the test of each and whether the test is slow."""
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            slow |= is_slow(node.value)
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            inner = f"{name}::{node.name}"
            slow_here = slow or any(map(is_slow, node.decorator_list))
            if isinstance(node, ast.ClassDef):
                yield from marks_of(node.body, inner, slow=slow_here)
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and _is_cell(mark.func):
                    yield mark, inner, slow_here


def cells_of(mark: ast.Call, test: str, slow: bool) -> list[Cell]:
    """Return the cells that a mark names; its arguments are written out, so that they can be read."""
    setup, *points = map(ast.literal_eval, mark.args)
    notes = {str(word.arg): ast.literal_eval(word.value) for word in mark.keywords}
    if setup not in SETUPS or not set(points) <= set(POINTS) or not points:
        raise ValueError(f"{test}: there is no cell {(setup, *points)}")
    return [Cell(setup, point, test, **notes, slow=slow) for point in points]


def _is_cell(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.cell"


def is_slow(mark: ast.expr) -> bool:
    """Return whether a mark, a mark of a list, or every case of a parametrization is slow."""
    if isinstance(mark, ast.List | ast.Tuple):
        return any(map(is_slow, mark.elts))
    if not isinstance(mark, ast.Call):
        return ast.unparse(mark) == "pytest.mark.slow"
    if ast.unparse(mark.func) != "pytest.mark.parametrize":
        return False
    cases = mark.args[1].elts if isinstance(mark.args[1], ast.List | ast.Tuple) else []
    words = [ast.unparse(case) for case in cases]
    return bool(words) and all("pytest.mark.slow" in w or w.startswith("*slow(") for w in words)


def table(cells: list[Cell]) -> str:
    """Return the table as Markdown, with its notes."""
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
    return "\n".join(lines) + "\n"


def tests_behind(cells: list[Cell]) -> list[tuple[str, str]]:
    """Return each set-up with the tests that back its cells."""
    rows = []
    for setup in SETUPS:
        tests = dict.fromkeys(cell.test for cell in cells if cell.setup == setup)
        rows.append((setup, " ".join(f"`{test}`" for test in tests)))
    return rows


def _cell(cells: list[Cell], notes: dict[str, int]) -> str:
    if not cells:
        return "not tested"
    words = []
    if any(not cell.differs and not cell.refused for cell in cells):
        words.append("acts")
    for verb in ("differs", "refused"):
        told = dict.fromkeys(text for cell in cells if (text := getattr(cell, verb)))
        numbers = [str(notes.setdefault(text, len(notes) + 1)) for text in told]
        if numbers:
            words.append(f"{verb} ({', '.join(numbers)})")
    return ", ".join(words)
