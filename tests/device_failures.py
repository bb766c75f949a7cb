"""What only CUDA does, on a device made of Python: it captures a graph, or an assert of a kernel fails.

The cases belong to `device_cases.py`, which runs them in a process of its own.
"""

from __future__ import annotations

import tempfile

import torch
from pack_trainings import launched
from ranks import Json
from small import messages, tanh_net
from torch import Tensor, nn

import gradsurgeon
from benchmarks.operations import counting
from benchmarks.toy_device import Toy, move, watchers
from gradsurgeon.tensors import _torch

NORMS = {"version": 1, "rules": [{"id": "norms", "action": "norm-log", "params": "*"}]}


def on_device() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = tanh_net(4, 6, 2)
    move(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(Toy(torch.randn(5, 4))).square().mean().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model, optimizer)
    optimizer.step()


def captured() -> Json:
    """Run a pack where a graph is captured: a read by the host would end the capture."""
    reads: list[int] = []

    def train() -> list[Tensor]:
        model, optimizer = on_device()
        # Checks look at the first three losses.
        for number in range(6):
            _torch.is_capturing = lambda number=number: number == 4  # type: ignore[misc]
            with counting() as counts:
                step(model, optimizer)
            reads.append(counts.host_reads)
        return []

    done = launched(train)
    return {"reads": reads, "lines": done.lines}


class Failing:
    """A device on which an assert of a kernel has failed: it refuses every call."""

    def __call__(self, _: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nfor debugging ...")

    def __enter__(self) -> None:
        watchers.append(self)

    def __exit__(self, *_: object) -> None:
        watchers.remove(self)


def failed(where: str = "forward") -> Json:
    """End a script under a pack by a device that fails in its forward pass, or right before an update."""
    failing = Failing()

    def train() -> list[Tensor]:
        model, optimizer = on_device()
        for _ in range(70):
            step(model, optimizer)
        if where == "update":
            model(Toy(torch.randn(5, 4))).square().mean().backward()
        failing.__enter__()
        optimizer.step() if where == "update" else step(model, optimizer)
        return []

    with tempfile.TemporaryDirectory() as folder:
        try:
            done = launched(train, record=f"{folder}/run", ends_by=(torch.AcceleratorError,))
        finally:
            failing.__exit__()
        with gradsurgeon.open_run(f"{folder}/run") as run:
            steps = [step for step, _ in run.history("2.weight")]
            ended = gradsurgeon.report.summary(run).head[0]
    return {"lines": done.lines, "steps": steps, "ended": ended}


def failed_at_the_update() -> Json:
    return failed("update")


def failed_under_apply() -> Json:
    """Leave a session by the error of a device: its end raises no other one."""
    model, optimizer = on_device()
    try:
        with gradsurgeon.apply(model, NORMS, optimizer=optimizer) as session:
            for _ in range(70):
                step(model, optimizer)
            failing = Failing()
            failing.__enter__()
            step(model, optimizer)
    except torch.AcceleratorError as error:
        context = repr(error.__context__)
    failing.__exit__()
    told = messages(session, "notice")
    return {
        "context": context,
        "told": told,
        "steps": len(session.history("2.weight", rule="norms")),
    }
