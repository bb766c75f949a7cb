"""The page of a run with several losses in a real browser: matrices, tables and curves, and no markup of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from page_views import HOSTILE, open_page, plots
from runs import add, meta, values

from gradsurgeon.records.store import Key
from gradsurgeon.records.store.writer import RunWriter

pytestmark = pytest.mark.slow


def losses_run(path: Path, *, losses: tuple[str, str, str], parts: int = 0) -> Path:
    """Eighty calls in which the first two losses begin to conflict at step 32."""
    role = {"role": "observe", "stats": ["cosine", "ratio"]}
    about = meta(
        ("w",),
        roles={"tasks": role},
        plan={"rules": [{"id": "tasks", "action": "conflict", "params": ["w"]}]},
    )
    writer = RunWriter(path, rank=0, meta=about)
    one, two, three = losses
    pairs: tuple[str, ...] = (f"{one}/{two}", f"{one}/{three}", f"{two}/{three}")
    if parts:
        pairs = tuple(f"w{part}:{pair}" for part in range(parts) for pair in pairs)
    for step in range(80):
        row = (0.5 if step < 32 else -0.9, 0.25, 0.75)
        key = Key("tasks", "cosine", "backward", pairs)
        add(writer, key, step, values(*row * max(1, parts)), frozenset())
    add(writer, Key("surgery", "weight", "backward", losses), 0, values(1.0, 0.5, 2.0), frozenset())
    key = Key("surgery", "distance", "backward", ("combined",))
    add(writer, key, 0, values(0.5), frozenset())
    writer.close()
    return path


def test_it_shows_tables_and_curves(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, losses_run(tmp_path / "run", losses=("seg", "depth", HOSTILE)))
    headings = page.locator("h2").all_inner_texts()
    assert headings == ["What happened", "Losses against each other", "Rules"]
    assert plots(page) == 3
    remarks = page.locator("ul.remarks").first.inner_text()
    assert "1 pair of 3 conflict on average" in remarks
    assert any(HOSTILE in name for name in page.locator("td").all_inner_texts())
    assert page.title() != "harmed"
