"""The texts and keys of a trip: what its event records, and what the launcher shows."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.common.rows import numbered
from gradsurgeon.runtime.trap_report import TrapReport
from gradsurgeon.tensors import _dist

_MOST_SAMPLES = 256


def event_keys(diagnosis: Diagnosis | None, sample_ids: Sequence[Tensor]) -> dict[str, Any]:
    """Return further keys of the event of a trip; the ids have shape [n] for each batch. Waits for their device."""
    numbers: list[int] = []
    with suppress(Exception):  # there may be none, or on several devices
        numbers = torch.cat(list(sample_ids))[:_MOST_SAMPLES].tolist()
    values = None
    if diagnosis is not None:
        values = diagnosis.to_json()
    return {"diagnosis": values, "sample_ids": tuple(numbers)}


def texts(
    place: str,
    report: TrapReport,
    outcome: str,
    diagnosis: Diagnosis | None,
    sample_ids: Sequence[int],
) -> tuple[str, str]:
    """Return the message of a trip, and the text for a terminal, which is empty if it is no other.

    The first two lines of a message say what happened and what was done. A diagnosis that blames nobody comes last. A
    terminal shows any other diagnosis first.
    """
    head = f"{place}: {report.head}"
    lines = list(report.lines)
    if sample_ids:
        lines.insert(0, f"samples of this step: {numbered('sample_id', sample_ids)}")
    if diagnosis is None or not diagnosis.blames:
        if report.hint:
            lines.append(report.hint)
        return "\n".join([head, outcome, *lines, *diagnosis_lines(diagnosis)]), ""
    shown = [*born_lines(place, diagnosis), f"{report.head}; {outcome}", *lines]
    return "\n".join([head, outcome, *diagnosis_lines(diagnosis), *lines]), "\n".join(shown)


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
