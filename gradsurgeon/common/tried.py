"""What a replay showed of a step that was run again under a remedy. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_LOSS_OUTSIDE = "the loss is made outside of the model and was not tried"


@dataclass(frozen=True, slots=True)
class Tried:
    """One remedy, and whether it helped; ``None`` where a replay cannot know it.

    Attributes:
        remedy: what was changed, such as ``without row 11 of the input``.
        gradients_finite: whether those of parameters and inputs are, for the kept gradients of the outputs.
        loss: the loss, if the model returns it.
        problem: why the step could not be run under the remedy.
    """

    remedy: str
    outputs_finite: bool | None = None
    gradients_finite: bool | None = None
    loss: float | None = None
    problem: str = ""

    def to_json(self) -> dict[str, object]:
        values = asdict(self)
        del values["problem"]
        if not math.isfinite(self.loss or 0):
            values["loss"] = str(self.loss)
        return values

    def __str__(self) -> str:
        words = {True: "are finite", False: "are not finite"}
        named = {"the outputs": self.outputs_finite, "the gradients": self.gradients_finite}
        parts = [self.problem] if self.problem else []
        if self.outputs_finite == self.gradients_finite is not None:
            named = {"the outputs and the gradients": self.outputs_finite}
        for name, are_finite in named.items():
            if are_finite is not None:
                parts.append(f"{name} {words[are_finite]}")
        if self.loss is not None:
            parts.append(f"the loss is {self.loss:.4g}")
        return f"{self.remedy} {', '.join(parts)}"


def in_words(tried: Sequence[Tried]) -> str:
    """Return one sentence on all remedies; it says so if a step that ran again tells nothing of the loss."""
    parts = list(map(str, tried))
    if any(each.loss is None and not each.problem for each in tried):
        parts.append(_LOSS_OUTSIDE)
    return "; ".join(parts)
