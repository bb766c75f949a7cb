"""Counting what a step does, apart from timing it: the profiler that counts also slows down."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]

# What hands the value of a tensor to Python. On a CUDA device each of them waits for the device.
_READS = frozenset({"aten::_local_scalar_dense", "aten::nonzero"})
_MEMORY = "[memory]"


@dataclass(frozen=True, slots=True)
class Counts:
    """What one call does.

    Attributes:
        allocations: blocks of tensor memory that it asks for.
        reads: tensor values that it hands to Python.
    """

    allocations: int
    reads: int

    def beyond(self, base: Counts) -> dict[str, int]:
        """Return what comes on top of a baseline, as a row has it."""
        return {
            "allocations": self.allocations - base.allocations,
            "reads": self.reads - base.reads,
        }


def _events(call: Call, *, memory: bool) -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=memory) as seen:
        call()
    # The public list folds allocations into the operations that made them.
    return list(seen.profiler.kineto_results.events())


def counted(call: Call, device: str) -> Counts:
    """Return what a call does."""
    cuda = device == "cuda"
    before = _cuda_blocks() if cuda else 0
    events = _events(call, memory=not cuda)
    blocks = sum(event.name() == _MEMORY and event.nbytes() > 0 for event in events)
    reads = sum(event.name() in _READS for event in events)
    return Counts(_cuda_blocks() - before if cuda else blocks, reads)


def _cuda_blocks() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def peak(call: Call, device: str) -> int:
    """Return by how many bytes tensor memory grows at most during a call."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = int(torch.cuda.memory_allocated())
        call()
        return int(torch.cuda.max_memory_allocated()) - before
    events = _events(call, memory=True)
    sizes = (event.nbytes() for event in events if event.name() == _MEMORY)
    return int(max(accumulate(sizes, initial=0)))


def waits(call: Call, device: str) -> int | None:
    """Return how often a call waits for the device, as torch tells it; ``None`` on the host.

    Of several calls the least: what a recorder hands over now and then is a wait that is wanted.
    """
    return None if device != "cuda" else min(_waits(call) for _ in range(3))


def _waits(call: Call) -> int:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Setting the mode warns as well, in other words.
    return sum("called a synchronizing" in str(warning.message) for warning in seen)
