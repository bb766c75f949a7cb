"""The question to ask before reading a tensor that no rule has matched: a leaf, a loss, an output, a buffer."""

from torch import Tensor

from gradsurgeon.tensors import _dist, _torch


def readable(tensor: Tensor) -> Tensor | None:
    """Return the elements that this rank holds of a tensor, detached, or ``None`` if there is nothing to read now.

    FSDP frees whole parameters between passes, and a read of freed memory ends the process. Other tensors wrap the
    result of a collective that is under way, or have no numbers at all, as on the meta device.
    """
    part = _dist.local(tensor)
    if _torch.is_wrapper(part) or _torch.is_unreadable(part):
        return None
    return part.detach()
