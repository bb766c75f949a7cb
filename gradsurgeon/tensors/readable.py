"""The question to ask before reading a tensor that no rule has matched: a leaf, a loss, an output, a buffer."""

from torch import Tensor

from gradsurgeon.tensors import _dist, _torch


def readable(tensor: Tensor) -> Tensor | None:
    """Return the elements that this rank holds of a tensor, detached, or ``None`` if there is nothing to read now.

    FSDP frees whole parameters between passes, and a read of freed memory ends the process. Other tensors wrap the
    result of a collective that is under way, or have no numbers at all, as on the meta device.
    """
    if not is_readable(tensor):
        return None
    return _dist.local(tensor).detach()


def is_readable(tensor: Tensor) -> bool:
    part = _dist.local(tensor)
    return not (_torch.is_wrapper(part) or _torch.is_unreadable(part))
