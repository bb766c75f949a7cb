"""Reading what a run directory stores of captured tensors. Needs no torch."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradsurgeon.errors import printable
from gradsurgeon.records.store.layout import captures_name

_LONGEST = 64 * 2**20


def captures(folder: Path, ranks: Iterable[int]) -> tuple[list[dict[str, Any]], str]:
    """Return what is stored of captured tensors of the lowest rank that has some, and why it cannot be read.

    An entry has a `rule`, its `tensors`, and how many `more` there were; `CapturedTensors.described` made it.
    """
    for rank in ranks:
        path = folder / captures_name(rank)
        if not path.exists():
            continue
        try:
            with path.open("rb") as file:
                return json.loads(file.read(_LONGEST)), ""
        except (OSError, ValueError, RecursionError):
            return (
                [],
                f"{printable(str(path))}: is damaged, or cannot be read: no table of captured tensors",
            )
    return [], ""
