"""Reading the captured tensors of a run directory: numbers and small maps. Needs no torch."""

import json
from typing import Any

from gradsurgeon.errors import printable
from gradsurgeon.records.store.layout import captures_name
from gradsurgeon.records.store.run import Run

_LONGEST = 64 * 2**20


def captures(run: Run) -> tuple[list[dict[str, Any]], str]:
    """Return the captured tensors of the lowest rank that has some, and why they cannot be read.

    An entry has a `rule`, its `tensors`, and how many `more` there were; `CapturedTensors.previews` made it.
    """
    for rank in run.ranks:
        path = run.path / captures_name(rank)
        if not path.exists():
            continue
        try:
            with path.open("rb") as file:
                return json.loads(file.read(_LONGEST)), ""
        except (OSError, ValueError, RecursionError):
            text = "is damaged, or cannot be read: no pictures of captured tensors"
            return [], f"{printable(str(path))}: {text}"
    return [], ""
