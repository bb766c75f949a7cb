"""The table of what a step asks of a device."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import device_counts
from benchmarks.formatting import number, table
from benchmarks.overhead import Row


def table_of(rows: Sequence[Row]) -> str:
    """Return the table of what a step asks of a device: per size the operations, and more of the largest."""
    sizes = list(dict.fromkeys((row["params"], row["dtypes"]) for row in rows))
    calls = {
        (row["case"], row["params"], row["dtypes"]): f"{_signed(row, 'operations')} "
        f"({row['list_operations']:,})"
        for row in rows
    }
    largest, kind = max((params, kind) for params, kind in sizes if " and " not in kind)
    head = [
        "",
        *(f"{params:,} {kind}" for params, kind in sizes),
        "read",
        "written",
        "allocations",
        "host reads",
        "copies to the host",
        "copies from it",
        "launches on CUDA",
    ]
    shown = [row for row in rows if (row["params"], row["dtypes"]) == (largest, kind)]
    return table(head, ((
        row["case"], *(calls[row["case"], *size] for size in sizes),
        *(f"{number(row[key] / row['gradient_bytes'])} x" for key in ("bytes_read", "bytes_written")),
        *(_signed(row, key) for key in ("allocations", "host_reads", "copies_to_host", "copies_from_host")),
        "not run" if row["launches"] is None else _signed(row, "launches"),
    ) for row in shown))  # fmt: skip


def _signed(row: Row, key: str) -> str:
    """Return what a case adds, and of the bare step what it has."""
    return f"{row[key]:,}" if row["case"] == device_counts.BARE else f"{row[key]:+,}"
