"""The texts and keys of a trip: what its event records, and what the launcher shows."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.common.rows import listed
from gradsurgeon.runtime.trap_report import TrapReport
from gradsurgeon.tensors import _dist

_MOST_SAMPLES = 256


def event_keys(diagnosis: Diagnosis | None, sample_ids: Sequence[Tensor]) -> dict[str, Any]:
    """Return further keys of the event of a trip; the ids have shape [n] for each batch. Waits for their device."""
    numbers: list[int] = []
    for ids in sample_ids:
        numbers += ids[: _MOST_SAMPLES - len(numbers)].tolist()
    keys: dict[str, Any] = {"diagnosis": None, "sample_ids": tuple(numbers)}
    if diagnosis is not None:
        keys["diagnosis"] = diagnosis.to_json()
    return keys


def event_text(
    head: str, outcome: str, report: TrapReport, diagnosis: Diagnosis | None, keys: dict[str, Any]
) -> str:
    """Return the message of an event or an exception: its first two lines say what happened and what was done."""
    lines = [head, outcome, *diagnosis_lines(diagnosis), *_samples(keys), *report.lines]
    if report.hint and (diagnosis is None or not diagnosis.blames):
        lines.append(report.hint)
    return "\n".join(lines)


def shown_text(
    place: str, outcome: str, report: TrapReport, diagnosis: Diagnosis | None, keys: dict[str, Any]
) -> str:
    """Return the same for a terminal, where the diagnosis comes first; empty if the event's message does."""
    if diagnosis is None or not diagnosis.blames:
        return ""
    lines = born_lines(place, diagnosis)
    return "\n".join([*lines, *_samples(keys), f"{report.head}; {outcome}", *report.lines])


def born_lines(place: str, diagnosis: Diagnosis) -> list[str]:
    """Return a diagnosis whose first line is the place of the trip and of the birth."""
    head = f"{place}: {diagnosis.headline}, {diagnosis.certainty}"
    return [head, *_finder(diagnosis), *diagnosis.details()]


def diagnosis_lines(diagnosis: Diagnosis | None) -> Iterator[str]:
    if diagnosis is not None:
        yield from _finder(diagnosis)
        yield from diagnosis.text()


def _finder(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.rank != _dist.rank():
        yield f"found by rank {diagnosis.rank}, in its part of the batch:"


def _samples(keys: dict[str, Any]) -> Iterator[str]:
    if keys["sample_ids"]:
        yield f"sample_ids of this step: {listed(keys['sample_ids'])}"
