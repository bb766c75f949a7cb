"""Notices a script that changes gradients between backward and the update, such as by a clip."""

import torch
from torch import Tensor

from gradsurgeon.tensors.measure import Norms

# A `GradScaler` divides by its scale, which rounds half precision.
_TOLERANCE = 1e-3


class ScriptEdits:
    """Compares the norms after the last backward pass with those right before the update."""

    def __init__(self) -> None:
        # Maps each device to a flag on it, whether a norm changed; the host reads them at the end.
        self._changed: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def compare(self, before: Norms, now: Norms) -> None:
        """Compare the norms of an update. Those of other parameters are not compared; never waits for a device."""
        for (indices, old), (others, new) in zip(before, now, strict=False):
            if indices != others:
                continue
            # A comparison with NaN is false: the trap reports it.
            changed = (old - new).abs().gt(new * _TOLERANCE).any()
            self._changed[new.device] = changed | self._changed.get(new.device, changed)

    def result(self) -> bool | None:
        """Return whether the script changed gradients, ``None`` if that is unknown. Waits for the devices."""
        try:
            changed = [bool(flag) for flag in self._changed.values()]
        except RuntimeError:  # a device that has failed
            return None
        return any(changed) if changed else None
