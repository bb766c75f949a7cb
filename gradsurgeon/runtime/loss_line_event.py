"""Waits for the line of an operation of a loss that a trap or a check blames, and makes an event of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradsurgeon.actions.checks.base import LossSource
from gradsurgeon.common.diagnosis import Diagnosis, Line
from gradsurgeon.forensics.kept_step import KeptLoss
from gradsurgeon.forensics.loss_line import LossLine
from gradsurgeon.runtime.context import Context
from gradsurgeon.tensors.backward_graph import label_of


def blamed_in(loss: KeptLoss, diagnosis: Diagnosis) -> LossSource:
    """Return the operation that a diagnosis blames, by its place in the loss; the last one if it blames none."""
    place = diagnosis.loss_place % len(loss.nodes)
    return LossSource(loss.nodes, place, diagnosis, loss.pass_key)


def await_line(
    line: LossLine, source: LossSource, context: Context, rule: str, step: int, *, warns: bool
) -> None:
    """Emit an event with the line of an operation as soon as a pass runs through the same operations."""
    label = label_of(source.nodes[source.place], source.nodes)
    # The nodes hold tensors, which need not stay until the next pass.
    diagnosis = source.diagnosis

    def tell(lines: tuple[Line, ...], differentiated: str) -> None:
        note = ""
        if diagnosis is not None and not diagnosis.node:
            note = ", with which the loss ends (it is not blamed)"
        elif differentiated:
            note = f", in the derivative of {differentiated}"
        text = f"{context.place(step, rule)}: the line of {label}{note}: {lines[0]}"
        keys: Mapping[str, Any] = {}
        if diagnosis is not None:
            node = diagnosis.node and f"{diagnosis.node}{note}"
            keys = {"diagnosis": replace(diagnosis, lines=lines, node=node).to_json()}
        context.event_log.emit(
            "notice", text, rule=rule, step=step, warn=warns, loud=True, facts=keys
        )

    line.wait_for(source.nodes, source.place, source.pass_key, tell)
