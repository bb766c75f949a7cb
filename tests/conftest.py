"""Every test starts from the same random state, on one thread, so that bits can be compared."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_search() -> None:
    # Sessions look for optimizers among all live objects. What is there before the tests of a file
    # begin, such as torch itself, need not be searched a hundred times.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    # Torch-free tests must stay torch-free.
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
    yield
    if "gradsurgeon.runtime.registry" in sys.modules:
        from gradsurgeon.runtime import registry

        # A session that a failed test left behind must not meet the optimizers of the next one.
        for session in list(registry._sessions.values()):
            session._state.journal.never_fired = list  # type: ignore[method-assign]
            session.remove()
