"""The action `capture`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Role, Rule


class Capture(Rule):
    """Keep a tensor itself: features, activations, gradients.

    ## What it does
    Keeps a detached copy of every matched tensor, to be read with `session.captured(rule)`, which
    returns `{(name, step, call): tensor}`; `call` counts within a step. It changes nothing.

    ## Why use it
    Feature extraction, Grad-CAM, looking at one activation, comparing two runs, without a line in
    the model.

    ## Points
    Of a parameter as `norm-log`: `accumulated` (default), `backward`, `step`. Module tensors and
    tags are copied at the moment they exist.

    ## Cost
    One copy per tensor, on its device. At `max_bytes` the oldest copies make room.
    """

    role: ClassVar[Role] = "capture"
    points: ClassVar = ("accumulated", "backward", "step")

    action: Literal["capture"] = "capture"
    max_bytes: Annotated[
        int, Field(ge=1, description="Bytes kept in all; the oldest copies make room.")
    ] = 256 * 2**20
