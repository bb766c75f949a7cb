"""A rank that trains alone neither waits for the store of a rank that has ended, nor says a word of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bounds import TIMEOUT
from pairs import slow
from ranks import start_ranks

pytestmark = pytest.mark.cover_children
STEPS = "20"


@pytest.mark.parametrize(
    "when", ["before the first update", *slow("before the session", "after some updates")]
)
def test_a_rank_trains_on_when_the_host_of_the_store_has_ended(when: str, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("lone_worker.py")
    started = start_ranks(worker, tmp_path / "seen", 2, [when])
    for rank, done in enumerate(fork.wait(TIMEOUT) for fork in started):
        err = done.stderr.decode()
        assert done.returncode == 0, err
        assert (tmp_path / f"seen.{rank}").read_text() == STEPS
        # A connection that is tried in vain, and a request that fails, are told there by torch.
        assert "c10d" not in err
