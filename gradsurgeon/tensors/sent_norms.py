"""Norms that stay on their device as a flag, or travel to the host while training goes on."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon.tensors import _torch
from gradsurgeon.tensors.measure import Norms, norm_tensors


def as_norms(numbers: Sequence[Tensor]) -> Norms:
    """Return 0-dim numbers of one device in the form of norms, numbered from 0."""
    return tuple([((place,), number.reshape(1)) for place, number in enumerate(numbers)])


def is_any_nonfinite(norms: Norms) -> Tensor:
    """Return whether a norm is non-finite, 0-dim and bool, on the one device of the norms. Does not wait for it."""
    together = norm_tensors(norms)
    values = together[0] if len(together) == 1 else torch.cat(together)
    # A NaN is the largest of any numbers, and not below infinity.
    return values.amax().lt(math.inf).logical_not()


def are_on_one_device(several: Sequence[Norms]) -> bool:
    devices = {values.device for values in norm_tensors(*several)}
    return len(devices) == 1


class SentNorms:
    """Norms of one device on their way to the host."""

    def __init__(self, several: Sequence[Norms]) -> None:
        self._several = several
        self._arrival = _torch.send(norm_tensors(*several))

    def read(self) -> list[Norms]:
        """Return the norms on the host, in their order. Waits for those that have not arrived."""
        landed = iter(self._arrival.wait())
        on_host = []
        for norms in self._several:
            pairs = [(indices, next(landed)) for indices, _ in norms]
            on_host.append(tuple(pairs))
        return on_host
