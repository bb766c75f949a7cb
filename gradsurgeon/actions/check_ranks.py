"""The action `check-ranks`."""

from typing import Literal

from gradsurgeon.actions._effects import Examination
from gradsurgeon.actions._kinds import CheckRule


class CheckRanks(CheckRule):
    """Find ranks whose gradients or weights differ although they train replicas.

    ## What it finds
    Under `DistributedDataParallel`, gradients that differ between the ranks of the wrapper at the update: a forward pass
    around the wrapper, a second backward pass through one forward pass, parameters that the wrapper does not know, a clip
    that one rank makes, a device that lost data. Weights that differ although gradients are alike: ranks that began
    with different weights, or an update that one rank skipped.

    Ranks of a wrapper that train on the same data: inputs of the model and losses that are equal in each bit in ten updates
    in a row. It takes a `nan-trap`, which keeps the inputs. If the inputs are the same in all ten updates, as where a script
    overfits one batch, that is a fact.

    Ranks that average gradients by hand, and replicas of shards, are compared as well. Gradients that were equal in each
    bit in three updates in a row, and not zero or constant, show which parameters the ranks share. A difference is
    reported only if the weights differ and the gradients are equal again.

    ## What stays quiet
    Ranks that train apart: sweeps, local SGD, stages of a pipeline, own heads and experts, wrappers with process groups of
    their own, training before the wrapper. Losses that all ranks have in common but not their inputs, as contrastive ones
    over gathered embeddings; tensor-parallel ranks. Parts of a sharded parameter. Differences of rounding, below a ten-thousandth.

    ## Cost
    In each update, above 64 ranks in one of eight: the norm of each gradient, which a `nan-trap` on the same gradients has
    measured already, and a norm and a sum of 1,024 elements of each gradient, weight and input. Each rank sends its numbers to the
    store of the job and waits for no other rank; the first rank of each group compares.
    """

    action: Literal["check-ranks"] = "check-ranks"

    def compile(self) -> Examination:
        from gradsurgeon.actions.checks.ranks_check import RanksCheck  # noqa: PLC0415 # it needs torch

        return Examination(RanksCheck(), self.then)
