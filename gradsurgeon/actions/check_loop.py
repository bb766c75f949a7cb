"""The action `check-loop`."""

from typing import Literal

from gradsurgeon.actions._effects import Examination
from gradsurgeon.actions._kinds import CheckRule


class CheckLoop(CheckRule):
    """Find faults in the order of a training loop.

    ## What it finds
    Updates on gradients from before the last update (no `zero_grad()`); gradients that came in the backward pass and
    were gone at the update, also because two optimizers hold the same parameters; gradients that were clipped while
    they carried the scale of a `GradScaler`; a loss that is non-finite though all gradients are finite; a model that
    was left in evaluation mode after an evaluation.
    All faults but the loss are reported from the third update in a row on.

    ## What stays quiet
    A model that trains in evaluation mode from the start, or from a stage on that no evaluation began; a script that
    has returned to training mode after an evaluation before. Evaluations are seen as calls of the model without
    gradients, by the diagnosis of a `nan-trap`; without one, every such change of mode is reported. Attacks and
    evaluations between steps; gradients that the script decays instead of clearing; accumulation over several
    optimizers; passes of a GAN through the other player; gradients divided by a constant while they are scaled.

    ## Cost
    A few elements of four gradients per optimizer, for twenty updates, then in three of each hundred; and the
    loss, a single number.
    """

    action: Literal["check-loop"] = "check-loop"

    def compile(self) -> Examination:
        from gradsurgeon.actions.checks.loop_check import LoopCheck  # noqa: PLC0415 # it needs torch

        return Examination(LoopCheck(), self.then)
