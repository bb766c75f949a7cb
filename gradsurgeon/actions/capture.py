"""The action `capture`."""

from __future__ import annotations

from typing import Literal

from gradsurgeon.actions._kinds import CaptureRule


class Capture(CaptureRule):
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

    action: Literal["capture"] = "capture"
