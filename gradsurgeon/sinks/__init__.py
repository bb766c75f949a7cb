"""Trackers that get the aggregates of a run while it goes on: `gradsurgeon.apply(model, rules, sinks=[...])`.

A sink gets few numbers, however large the model is: hundreds of curves help nobody, and cost more than the
training. Per step and rule it gets the norm of all tensors together, the largest, median and least norm, the number of
non-finite norms, and a histogram. Single tensors have curves if the sink names them. Events are texts, and the text
of a trap has the diagnosis. Each sink works on a thread of its own. If it fails, blocks or cannot keep up, that is an
event, and training goes on.

A sink imports its client when it is made. This package needs neither torch nor a client.
"""

from gradsurgeon.sinks.mlflow import MLflow
from gradsurgeon.sinks.sink import Sink
from gradsurgeon.sinks.tensorboard import TensorBoard
from gradsurgeon.sinks.wandb import WandB

__all__ = ["MLflow", "Sink", "TensorBoard", "WandB"]
