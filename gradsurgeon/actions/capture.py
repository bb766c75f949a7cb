"""The action `capture`."""

from typing import Literal

from gradsurgeon.actions._kinds import CaptureRule


class Capture(CaptureRule):
    """Keep a tensor itself: features, activations, gradients.

    ## What it does
    Keeps a detached copy of every matched tensor and changes nothing. `session.captured(rule)` returns
    `{(name, step, call): tensor}`; `call` counts within a step.

    ## Why use it
    Feature extraction, Grad-CAM, looking at one activation, comparing two runs, without a line in
    the model.

    ## Points
    Parameters as in `norm-log`: `accumulated` (default), `backward`, `step`. Module tensors and
    tags are copied at the moment they exist.

    ## Cost
    One copy per tensor, on its device. At `max_bytes` new copies replace the oldest.
    """

    action: Literal["capture"] = "capture"
