"""The outcome of an update that the device decides on: the host learns it right before the next update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

Act = Callable[..., object]


class DeviceOutcome:
    """Whether the optimizer leaves an update out, as only the device knows.

    Attributes:
        overflow: the flag of a `GradScaler`, if one steps the optimizer.
        loss_scale: the scale of that scaler in this step.
        left_out: whether the optimizer leaves the update out; 0-dim, float32, exactly 0 or 1.
        for_traps: whether the device decides in the place of traps, so the optimizer needs the flag.
    """

    def __init__(
        self,
        overflow: Tensor | None,
        loss_scale: Tensor | None,
        others: Tensor | None = None,
        *,
        for_traps: bool = False,
    ) -> None:
        self.overflow = overflow
        # The flag of a scaler, and that of another session, or of the script.
        self._flags = [flag for flag in (overflow, others) if flag is not None]
        self.for_traps = for_traps
        # The scaler changes its tensor.
        self.loss_scale = None if loss_scale is None else loss_scale.clone()
        self.left_out = _joined(self._flags)
        # Callbacks that the host calls once it knows whether a scaler, and whether anything, left the update out.
        self._held: list[Callable[[bool, bool], object]] = []
        # The host knows these answers; a hook of the script may have asked within the step.
        self._known: tuple[bool, bool] | None = None

    def decide(self, objections: Sequence[Tensor]) -> None:
        """Take the objections of traps, 0-dim and bool. Does not wait for the device."""
        self.left_out = _joined([*objections, *self._flags])

    def hold(self, act: Callable[[bool, bool], object]) -> None:
        if self._known is None:
            self._held.append(act)
        else:
            act(*self._known)

    def tell(self, *, overflowed: bool, left_out: bool) -> None:
        """Do what was held back, now that the host knows."""
        self._known = overflowed, left_out
        held = self._held
        self._held = []
        for act in held:
            act(overflowed, left_out)


def _joined(flags: Sequence[Tensor]) -> Tensor:
    if not flags:
        return torch.zeros((), device="cpu")
    # Fused kernels compare with 1, so a sum of flags will not do.
    return (reduce(torch.logical_or, flags) > 0).to(torch.float32)


def when_made(outcome: DeviceOutcome | None, act: Act, *args: Any) -> None:
    """Do what belongs to an update that takes place: now, or once the host knows."""
    if outcome is None:
        act(*args)
    else:
        outcome.hold(lambda _, left_out: left_out or act(*args))


def when_judged(outcome: DeviceOutcome | None, act: Act, *args: Any) -> None:
    """Do what belongs to an update that no scaler leaves out: now, or once the host knows."""
    if outcome is None or outcome.overflow is None:
        act(*args)
    else:
        outcome.hold(lambda overflowed, _: overflowed or act(*args))


def when_known(
    outcome: DeviceOutcome | None,
    took_place: bool,  # noqa: FBT001 # by which a callback is made
    act: Callable[[bool], object],
) -> None:
    """Call a function with whether an update took place: now, or once the host knows."""
    if outcome is None:
        act(took_place)
    else:
        outcome.hold(lambda _, left_out: act(took_place and not left_out))
