"""The action `check-loop`."""

from typing import Literal

from gradsurgeon.actions._effects import Examination
from gradsurgeon.actions._kinds import CheckRule


class CheckLoop(CheckRule):
    """Find faults in the order of a training loop.

    ## What it finds
    Updates on gradients from before the last update (no `zero_grad()`); gradients that came in the backward pass and
    were gone at the update, also because two optimizers hold the same parameters; gradients that two optimizers use one
    after the other; passes whose gradients are cleared before another pass, in ten updates in a row; gradients that
    were clipped, or used by `optimizer.step()`, while they carried the scale of a `GradScaler`; a clip between the update
    and the next backward pass; frozen parameters that momentum or weight decay still moves; ten updates in a row that the
    script undoes; a loss that is non-finite though all gradients are finite; a model that was left in evaluation mode
    after an evaluation.
    Copies of parameters in another dtype that are older than the last three updates and used by newer operations, as
    `torch.autocast` keeps them around a whole loop.
    A loss is reported at once; clips, cleared passes and undone updates from the tenth update in a row on, the rest from the third.

    Facts, which stand below the findings of a run and may be meant: all passes ran in evaluation mode, or had the same
    input; a scheduler goes more steps than there are updates; the learning rate of Adam is above 1.

    ## What stays quiet
    A model that trains in evaluation mode from the start, or from a stage on that no evaluation began; a script that
    has returned to training mode after an evaluation before. Evaluations are seen as calls of the model without
    gradients, by the diagnosis of a `nan-trap`; without one, every such change of mode is reported. Attacks and
    evaluations between steps; gradients that the script decays instead of clearing; accumulation over several
    optimizers; passes of a GAN through the other player; gradients divided by a constant while they are scaled.
    Passes of their own for attacks, SAM, ghost clipping, K-FAC or differential privacy; a pass with a loss of another
    kind that is cleared, and old weights that are loaded from a state dict, are facts. A clip with a bound that no
    gradient exceeds, codebooks and targets that move outside of the optimizer, zeroth-order methods, Lookahead,
    Reptile and line searches.
    Delayed gradients, as in a pipeline: their forward passes are older as a whole.

    ## Cost
    A few elements of four gradients per optimizer, for twenty updates, then in four of each hundred; and the
    loss, a single number. A walk through the graph after each of the first twenty updates. More is read once the
    order of events, a flag or a count of writes suggests a fault.
    """

    action: Literal["check-loop"] = "check-loop"

    def compile(self) -> Examination:
        from gradsurgeon.actions.checks.loop_check import LoopCheck  # noqa: PLC0415 # it needs torch

        return Examination(LoopCheck(), self.then)
