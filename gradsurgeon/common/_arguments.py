"""Checks of the arguments of public functions."""

from collections.abc import Sequence
from typing import Any


def check_options(scaler: object, mode: object, start_step: object, on_event: object) -> None:
    check_scaler(scaler)
    if mode not in ("act", "observe"):
        raise ValueError(f'mode is "act" or "observe", not {mode!r}')
    if isinstance(start_step, bool) or not isinstance(start_step, int) or start_step < 0:
        raise ValueError(f"start_step is a number of steps, 0 or more, not {start_step!r}")
    if on_event is not None and not callable(on_event):
        raise TypeError(f"on_event= must be a function of one event, not {type(on_event).__name__}")


def check_scaler(scaler: object) -> None:
    if scaler is not None and not hasattr(scaler, "unscale_"):
        raise TypeError(f"scaler= must be a torch.amp.GradScaler, not {type(scaler).__name__}")


def optimizers_of(given: Any) -> list[Any] | None:
    """Return a list of optimizers, `None` if none are given; an empty list is a statement of its own."""
    if given is None:
        return None
    optimizers = [given]
    if isinstance(given, Sequence):
        optimizers = list(given)
    for optimizer in optimizers:
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise TypeError(
                f"optimizer= must be torch optimizers, not {type(optimizer).__name__}; an empty list declares "
                "that the script updates weights by hand"
            )
    return optimizers
