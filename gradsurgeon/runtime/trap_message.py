"""The texts and keys of a trip: what its event records, and what the launcher shows."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.common.rows import numbered
from gradsurgeon.runtime.step_diagnosis import Tripped
from gradsurgeon.runtime.trap_report import TrapReport
from gradsurgeon.tensors import _dist

_MOST_SAMPLES = 256


def event_keys(diagnosis: Diagnosis | None, tripped: Tripped) -> dict[str, Any]:
    """Return further keys of the event of a trip. Waits for the device of the sample ids."""
    keys: dict[str, Any] = {"told_at": tripped.told_at}
    with suppress(Exception):  # there may be none, or on several devices
        numbers = torch.cat(list(tripped.sample_ids))
        keys["sample_ids"] = tuple(numbers[:_MOST_SAMPLES].tolist())
    if diagnosis is not None:
        keys["diagnosis"] = diagnosis.to_json()
    return keys


def texts(
    place: str,
    report: TrapReport,
    outcome: str,
    diagnosis: Diagnosis | None,
    keys: Mapping[str, Any],
) -> tuple[str, str]:
    """Return the message of a trip with the keys of its event, and the text for a terminal, which is empty if it is no other.

    The first two lines of a message say what happened and what was done. A diagnosis that blames nobody comes last. A
    terminal shows any other diagnosis first.
    """
    head = f"{place}: {report.head}"
    lines = list(report.lines)
    if keys.get("sample_ids"):
        lines.insert(0, f"samples of this step: {numbered('sample_id', keys['sample_ids'])}")
    if diagnosis is None or not diagnosis.blames:
        if report.hint:
            lines.append(report.hint)
        return "\n".join([head, outcome, *lines, *diagnosis_lines(diagnosis)]), ""
    born = f"{place}: {diagnosis.headline}, {diagnosis.certainty}"
    details = [*_finder(diagnosis), *diagnosis.details()]
    shown = [born, *details, f"{report.head}; {outcome}", *lines]
    return "\n".join([head, outcome, *diagnosis_lines(diagnosis), *lines]), "\n".join(shown)


def diagnosis_lines(diagnosis: Diagnosis | None) -> Iterator[str]:
    if diagnosis is not None:
        yield from _finder(diagnosis)
        yield from diagnosis.text()


def _finder(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.rank != _dist.rank():
        yield f"found by rank {diagnosis.rank}, in its part of the batch:"
