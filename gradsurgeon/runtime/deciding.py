"""Whether an edit has anything to do, where looking is free: on the host.

Most bounds do not bite in most steps. What would come out as it is need not be written, nor be looked
for other holders of its memory. On a device the answer would be a wait: there every edit runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon import _numbers, _torch
from gradsurgeon.actions import Edit

Range = tuple[float, float]
# Carrying out an edit on so few elements takes no longer than telling what becomes of their range.
_SMALL = 4096


def can_decide(edit: Edit, grad: Tensor) -> bool:
    """Tell whether looking at a gradient is free and says what an edit would do."""
    return edit.decided is not None and _torch.is_host(grad) and not grad.is_complex()


def changes(edit: Edit, grad: Tensor) -> bool | Tensor:
    """Tell whether an edit would change an element; on a device as a 0-dim bool tensor, unread."""
    if can_decide(edit, grad):
        return decide(edit, grad, _numbers.ends(grad))
    return edit.alters(_numbers.values(grad))


def decide(edit: Edit, grad: Tensor, found: Range) -> bool:
    """Tell whether an edit would change an element of a gradient with this range, on the host."""
    if not grad.numel():
        # It has no range, and bounds that exclude 0 would bite on one that is made up.
        return False
    answer = None if edit.decided is None else edit.decided(*found, grad.dtype)
    return bool(edit.alters(_numbers.values(grad))) if answer is None else answer


def changes_of_each(edits: Sequence[Edit], grad: Tensor) -> list[bool | Tensor]:
    """Tell of each of several edits, one after another, what `changes` tells of one."""
    if len(edits) == 1:
        return [changes(edits[0], grad)]
    host = all(can_decide(edit, grad) for edit in edits)
    if host and grad.numel() > _SMALL:
        return [own[0] for own in decide_each(edits, [grad], [_numbers.ends(grad)])]
    ends = _numbers.ends(grad) if host else None
    found: list[bool | Tensor] = []
    for place, edit in enumerate(edits):
        # What a rule has changed is asked of what the rules before it have left.
        found.append(changes(edit, grad) if ends is None else decide(edit, grad, ends))
        if found[-1] is not False and place + 1 < len(edits):
            grad = _numbers.on_values(edit.apply, grad)
            ends = _numbers.ends(grad) if host else None
    return found


def decide_each(
    edits: Sequence[Edit], grads: Sequence[Tensor], ranges: Sequence[Range]
) -> list[list[bool]]:
    """Tell of each of several edits, one after another, which gradients on the host it would change.

    Args:
        edits: all of which say by ranges what they do.
        grads: what the first of them gets.
        ranges: the smallest and the largest element of each.
    """
    if len(edits) == 1:
        return [[decide(edits[0], grad, own) for grad, own in zip(grads, ranges, strict=True)]]
    foreseen = _Foreseen(grads, ranges)
    return [foreseen.passes(edit) for edit in edits]


class _Foreseen:
    """Gradients on their way through several edits, which are carried out only where they must be.

    Args:
        grads: as they are before the first of them.
        ranges: the smallest and the largest element of each.
    """

    def __init__(self, grads: Sequence[Tensor], ranges: Sequence[Range]) -> None:
        self._grads = list(grads)
        self._ranges = list(ranges)
        # What has acted on the range of each, but not on the gradient.
        self._ahead: list[list[Edit]] = [[] for _ in grads]
        self._last: tuple[Edit, list[int]] | None = None

    def passes(self, edit: Edit) -> list[bool]:
        """Let an edit act; tell which gradients it would change."""
        if self._last is not None:
            self._foresee(*self._last)
        found = [self._changes(edit, place) for place in range(len(self._grads))]
        self._last = edit, [place for place, changed in enumerate(found) if changed]
        return found

    def _foresee(self, edit: Edit, places: list[int]) -> None:
        kinds: dict[torch.dtype, list[int]] = {}
        for place in places:
            self._ahead[place].append(edit)
            # Ends that are not finite do not say what becomes of the range: NaN hides the other
            # elements, and behind an infinity that is replaced another one is the end.
            if all(map(math.isfinite, self._ranges[place])):
                kinds.setdefault(self._grads[place].dtype, []).append(place)
        for kind, own in kinds.items():
            found = after(edit, [self._ranges[place] for place in own], kind)
            for place, ends in zip(own, found, strict=True):
                self._ranges[place] = ends

    def _changes(self, edit: Edit, place: int) -> bool:
        if not self._grads[place].numel():
            return False
        answer, found = None, self._ranges[place]
        if edit.decided is not None and (not self._ahead[place] or all(map(math.isfinite, found))):
            answer = edit.decided(*found, self._grads[place].dtype)
        if answer is None:
            self._catch_up(place)
            answer = decide(edit, self._grads[place], self._ranges[place])
        return answer

    def _catch_up(self, place: int) -> None:
        if self._ahead[place]:
            grad = self._grads[place]
            for edit in self._ahead[place]:
                grad = _numbers.on_values(edit.apply, grad)
            self._ahead[place].clear()
            self._grads[place], self._ranges[place] = grad, _numbers.ends(grad)


def after(edit: Edit, found: list[Range], kind: torch.dtype) -> list[Range]:
    """Return what becomes of ranges: an edit that keeps or turns the order maps ends to ends."""
    ends = edit.apply(torch.tensor(found, dtype=kind))
    return [(low, high) for low, high in ends.sort(dim=1).values.tolist()]
