"""Each worker runs once for all tests of its file."""

from __future__ import annotations

import pytest
from ranks import Ranks, run_ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Return what the ranks of a file's worker have found; the file may name how many ranks."""
    file = request.path
    name = file.stem.removeprefix("test_")
    out = tmp_path_factory.mktemp(name) / "seen"
    number = getattr(request.module, "RANKS", 2)
    return run_ranks(file.with_name(f"{name}_worker.py"), out, number)
