"""The table of what it costs to see several losses apart."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.formatting import duration, number, spread, table
from benchmarks.losses import TRUNKS
from benchmarks.overhead import Row


def tables(rows: Sequence[Row]) -> str:
    """Return one table per trunk: each way with two numbers for each number of losses."""
    parts = []
    for trunk in TRUNKS:
        own = [row for row in rows if row["workload"] == trunk.name]
        if not own:
            continue
        counts = list(dict.fromkeys(row["losses"] for row in own))
        steps = {row["losses"]: row["base_us"] for row in own if "skipped" not in row}
        told = ", ".join(f"{duration(step['median'])} at {count}" for count, step in steps.items())
        parts.append(f"**{trunk.name}**: {trunk.about}; the plain step takes {told} losses.\n")
        head = [
            "",
            *(f"{count} losses: {what}" for count in counts for what in ("x step", "memory")),
        ]
        found = {(row["case"], row["losses"]): row for row in own}
        ways = dict.fromkeys(row["case"] for row in own)
        lines = ([way, *_cells([found.get((way, count)) for count in counts])] for way in ways)
        parts.append(table(head, lines))
    return "\n".join(parts)


def _cells(rows: Sequence[Row | None]) -> list[str]:
    cells: list[str] = []
    for row in rows:
        if row is None or "skipped" in row:
            cells += [row["skipped"] if row else "", ""]
        else:
            cells += [spread(row["step_ratio"]), number(row["peak_bytes"] / row["trunk_bytes"])]
    return cells
