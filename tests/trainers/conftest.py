"""What trainers leave behind in a process is put back after each test that asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def own_environment() -> Iterator[None]:
    from accelerate.state import AcceleratorState

    before = dict(os.environ)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)
