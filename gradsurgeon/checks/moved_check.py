"""Holds weights to what a rule asserts: that enough of them move within some updates, or that none moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gradsurgeon.checks.base import Check, Finding, Update
from gradsurgeon.checks.sampling import by_device, differing, sample

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

    Args:
        least: the share of elements of each weight that have to differ once.
        within: the number of performed updates in which that has to happen.
        unmoved: whether all elements have to stay; then the other two mean nothing.
    """

    def __init__(self, *, least: float = 0.0, within: int = 0, unmoved: bool = False) -> None:
        self._least, self._within, self._unmoved = least, within, unmoved
        self._first: dict[int, Tensor] = {}
        self._steps: dict[int, int] = {}
        self._updates: dict[int, int] = {}

    def before_update(self, update: Update) -> Iterable[Finding]:
        take = fingerprint if self._unmoved else sample
        for tensor in update.tensors:
            if tensor not in self._steps and update.params[tensor].numel():
                self._first[tensor] = take(update.params[tensor])
                self._steps[tensor] = update.step
                self._updates[tensor] = 0
        return ()

    def after_update(self, update: Update) -> Iterable[Finding]:
        watched = [t for t in update.tensors if t in self._first]
        take = fingerprint if self._unmoved else sample
        new = {t: take(update.params[t]) for t in watched}
        for tensor in watched:
            self._updates[tensor] += update.took_place
        for tensors in by_device(watched, new):
            shares = differing([self._first[t] for t in tensors], [new[t] for t in tensors])

            def judge(seen: Tensor, tensors: Sequence[int] = tensors) -> Iterator[Finding]:
                return self._judge(update, dict(zip(tensors, seen.tolist(), strict=True)))

            update.later(shares, judge)
        return ()

    def _judge(self, update: Update, shares: dict[int, float]) -> Iterator[Finding]:
        if self._unmoved:
            if moved := [t for t, share in shares.items() if share]:
                text = _MOVED.format(first=self._steps[moved[0]], step=update.step)
                yield Finding("moved", text, tuple(moved))
            return
        for tensor in [t for t, share in shares.items() if share >= self._least]:
            self._first.pop(tensor, None)
        late = [t for t in shares if t in self._first and self._updates[t] >= self._within]
        if late:
            share, first = min(shares[t] for t in late), self._steps[late[0]]
            text = _TOO_FEW.format(within=self._within, share=share, first=first, least=self._least)
            yield Finding("unmoved", text, tuple(late))
        for tensor in late:
            del self._first[tensor]


def fingerprint(tensor: Tensor) -> Tensor:
    """Return two sums over the bits of a tensor, of which at least one changes with any element. Shape ``[2]``, int64."""
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8).view(-1)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(torch.split(flat, _CHUNK)):
        wide = chunk.to(torch.int64)
        # Sums modulo 2^64. Odd weights make a change of one element visible, other weights an exchange of two.
        places = torch.arange(len(wide), device=wide.device) + number * _CHUNK
        sums += torch.stack([(wide * (2 * places + 1)).sum(), (wide * (places * places + 1)).sum()])
    return sums
