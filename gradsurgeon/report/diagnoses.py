"""The diagnosis in the message of a trap, taken apart for a view that lays it out."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from gradsurgeon.events import Event, is_trip

_HEAD = re.compile(r"diagnosis \(([^)]*)\): (.*)")
_AT = re.compile(r"  at (.*?)(?:, in (\S+))?(?:: (.*))?")
_TENSOR = re.compile(r"  (in|out) +(\S+) (\[[^\]]*\] \S+): (.*)")
_CAUSE = re.compile(r"  cause: (.*)")
_REMEDY = re.compile(r"  to try: (.*)")
_MAGNITUDE = re.compile(r"    (.*?)  +(\S+)")


def diagnosis_of(message: str) -> dict[str, Any] | None:
    """Return headline, place, tensors, cause, remedy and magnitudes of a diagnosis, None if the message has none."""
    lines = message.split("\n")
    heads = ((number, _HEAD.fullmatch(line)) for number, line in enumerate(lines))
    start, head = next((pair for pair in heads if pair[1]), (0, None))
    if head is None:
        return None
    found: dict[str, Any] = {
        "certainty": head[1],
        "headline": head[2],
        "tensors": [],
        "magnitudes": [],
        "rest": [],
    }
    in_magnitudes = False
    for line in lines[start + 1 :]:
        if in_magnitudes and (match := _MAGNITUDE.fullmatch(line)):
            # A view has the numbers of what it shows.
            if "view" not in match[1]:
                found["magnitudes"].append([match[1], match[2]])
            continue
        in_magnitudes = line.startswith("  largest magnitudes")
        if "at" not in found and (match := _AT.fullmatch(line)):
            found |= {"at": match[1], "function": match[2] or "", "source": match[3] or ""}
        elif match := _TENSOR.fullmatch(line):
            found["tensors"].append(list(match.groups()))
        elif "cause" not in found and (match := _CAUSE.fullmatch(line)):
            found["cause"] = match[1]
        elif match := _REMEDY.fullmatch(line):
            found["remedy"] = match[1]
        elif not in_magnitudes:
            found["rest"].append(line.strip())
    return found


def first_diagnosis(events: Sequence[Event], edits: Collection[str] = ()) -> str:
    """Return the first diagnosis as one sentence with its line, else what the first trap found; empty if none tripped.

    Args:
        events: oldest first.
        edits: ids of rules that edit gradients, whose events are no trips.
    """
    for event in events:
        if (found := diagnosis_of(event.message)) is not None:
            at = f", {found['at']}" if found.get("at") else ""
            return f"step {event.step}: {found['headline']}{at}"
    trips = (event.message.partition("\n")[0] for event in events if is_trip(event, edits))
    return next(trips, "")
