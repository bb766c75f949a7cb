"""Trackers that get the aggregates of a run while it goes on: `gradsurgeon.apply(model, rules, sinks=[...])`.

What is sent is little, whatever the model: hundreds of curves are of no use to anybody, and cost more than the
training. Per step and rule these are the norm of all tensors together, the ten largest, the median, how many are
not finite, and a histogram; of tensors by name only those that a sink was asked for. Events are texts, and that of a
trap has the diagnosis. A sink works on a thread of its own. One that fails, blocks or cannot keep up is told as an
event, and training goes on.

The clients are imported when a sink is made: nothing here needs torch, or any of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsurgeon.sinks.mlflow import MLflow
    from gradsurgeon.sinks.sink import Sink
    from gradsurgeon.sinks.tensorboard import TensorBoard
    from gradsurgeon.sinks.wandb import WandB

__all__ = ["MLflow", "Sink", "TensorBoard", "WandB"]


def __getattr__(name: str) -> object:
    # `gradsurgeon run`, which only wants to know what there is, starts fast.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name.lower()}"), name)
