"""Finds ranks that train on the same batches."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Finding, Findings, Pass
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors.sampling import norms_and_sums

# Ranks may draw the same batch by chance, as of a small data set.
_IN_A_ROW = 10
_SAME = (
    "{ranks} trained on the same data in {number} updates in a row: inputs and losses are equal in every bit, so all of them "
    "do the work of one. Give the loader a `DistributedSampler`, or draw the data with a seed that depends on the rank"
)


def numbers_of(done: Pass) -> Tensor | None:
    """Return norms and signed sums of the inputs of a pass, added up, and its loss; ``None`` if it is not known."""
    inputs = done.inputs()
    if not inputs or done.loss is None:
        return None
    device = done.loss.device
    sums = norms_and_sums([values.to(device) for values in inputs]).sum(0)
    return torch.cat([sums, done.loss.float().expand(2)])


class SameData:
    """Counts the updates in a row whose numbers are the same on all ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._numbers: list[Tensor] = []

    def compare(self, step: int, own: Tensor, others: Iterable[Tensor]) -> Findings:
        """Compare the numbers of a step of the first rank with those of all others. Numbers that are not known are NaN."""
        for other in others:
            if not torch.equal(own, other):
                self._numbers.clear()
                return
        self._numbers.append(own[:2])
        if len(self._numbers) == _IN_A_ROW:
            text = _SAME.format(ranks=_dist.named(self._ranks), number=_IN_A_ROW)
            # A script may overfit one batch to see whether the model can.
            is_fact = bool((torch.stack(self._numbers) == own[:2]).all())
            yield Finding("data", text, step=step, is_fact=is_fact)
