"""Finds parameters that moved less, or more, than a rule says."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Check, Finding, Findings, Update
from gradsurgeon.tensors.sampling import by_device, differing, sample

_TOO_FEW = (
    "{{names}} should move: after {within} updates {share:.1%} of the elements of one of them differ from their values "
    "at step {first}, at least {least:.1%} should. Look at whether gradients reach it, at its learning rate and at "
    "its group of the optimizer"
)
_MOVED = (
    "{{names}} should stay as at step {first} and changed by the update of step {step}. "
    "Look at requires_grad, at the groups of the optimizer and its weight decay"
)
_CHUNK = 2**20


class MovedCheck(Check):
    """Compares weights right after updates with those before the first one.

    A share of ``least`` elements must differ once ``within`` performed updates; if ``within`` is 0, no element may.
    """

    def __init__(self, *, least: float = 0.0, within: int = 0) -> None:
        self._least = least
        self._within = within
        self._values: Callable[[Tensor], Tensor] = sample
        if not within:
            self._values = fingerprint
        # Maps each parameter that is still compared to the first values, and their step.
        self._first: dict[int, tuple[Tensor, int]] = {}
        # Maps each parameter to the performed updates since then.
        self._updates: dict[int, int] = {}

    def before_update(self, update: Update) -> Findings:
        for index in update.indices:
            param = update.params.get(index)
            if index not in self._updates and param is not None and param.numel():
                self._first[index] = self._values(param), update.step
                self._updates[index] = 0
        return ()

    def after_update(self, update: Update) -> Findings:
        new = {}
        for index in update.indices:
            if index in self._first and index in update.params:
                new[index] = self._values(update.params[index])
        for indices in by_device(new, new):
            first = [self._first[index][0] for index in indices]
            now = [new[index] for index in indices]
            update.when_known(partial(self._count, update, indices, differing(first, now)))
        return ()

    def _count(
        self,
        update: Update,
        indices: Sequence[int],
        shares: Tensor,
        took_place: bool,  # noqa: FBT001 # a callback
    ) -> None:
        for index in indices:
            self._updates[index] += took_place
        update.later(shares, partial(self._judge, update, indices))

    def _judge(self, update: Update, indices: Sequence[int], seen: Tensor) -> Findings:
        wrong: dict[int, float] = {}
        for index, share in zip(indices, seen.tolist(), strict=True):
            if index not in self._first:
                continue
            if not self._within:
                is_wrong = share > 0
            elif share >= self._least:
                is_wrong = False
                del self._first[index]
            else:
                is_wrong = self._updates[index] >= self._within
            if is_wrong:
                wrong[index] = share
        if not wrong:
            return
        at_first = {"first": self._first[min(wrong)][1]}
        text = _MOVED.format(step=update.step, **at_first)
        if self._within:
            share = min(wrong.values())
            text = _TOO_FEW.format(within=self._within, share=share, least=self._least, **at_first)
        for index in wrong:
            del self._first[index]
        yield Finding("moved", text, tuple(wrong))


def fingerprint(tensor: Tensor) -> Tensor:
    """Return two sums over the bits of a tensor, shape ``[2]``: any change of an element changes one."""
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8).view(-1)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(torch.split(flat, _CHUNK)):
        wide = chunk.to(torch.int64)
        # Sums modulo 2^64. Odd weights make a change of one element visible, other weights an exchange of two.
        places = torch.arange(len(wide), device=wide.device) + number * _CHUNK
        weights = torch.stack([2 * places + 1, places * places + 1])
        sums += (weights * wide).sum(1)
    return sums
