"""Whether an edit has anything to do, where looking is free: on the host.

Most bounds do not bite in most steps. What would come out as it is need not be written, nor be looked
for other holders of its memory. On a device the answer would be a wait: there every edit runs.
"""

from __future__ import annotations

from torch import Tensor

from gradsurgeon import _numbers, _torch
from gradsurgeon.actions import Edit

Range = tuple[float, float]


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
