"""The action `check-ranks`."""

from typing import Literal

from gradsurgeon.actions._effects import Examination
from gradsurgeon.actions._kinds import CheckRule


class CheckRanks(CheckRule):
    """Find ranks whose gradients or weights differ although they train replicas.

    ## What it finds
    Gradients that differ between ranks at the update: a forward pass that went around `DistributedDataParallel`, a
    collective that one rank left out, a device that lost data. Weights that differ although gradients are alike:
    ranks that began with different weights, or an update that one rank skipped. Ranks are compared by backward passes.

    ## What stays quiet
    Ranks that train apart, as in a sweep: only ranks under `DistributedDataParallel`, or ranks whose gradients were
    alike in three updates in a row, count as replicas. Sharded parameters, which differ rightly. Updates on
    passes under `no_sync`. Differences of rounding, below a ten-thousandth.

    ## Cost
    The norm of each gradient in each due update, which a `nan-trap` on the same gradients has measured already. The norm of
    1,024 elements of each weight in the first 32 passes, then in each eighth. Each rank sends eight rows at a
    time to the store of the job, and waits for nobody; the first rank compares.
    """

    action: Literal["check-ranks"] = "check-ranks"

    def compile(self) -> Examination:
        from gradsurgeon.checks.ranks_check import RanksCheck  # noqa: PLC0415 # it needs torch

        return Examination(RanksCheck(), self.then)
