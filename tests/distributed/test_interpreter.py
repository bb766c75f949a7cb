"""P3 and P5 on two ranks: under DDP rules do what an interpreter of the rule language does by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.hypothesis
def test_rules_do_what_the_interpreter_does_under_ddp(tmp_path: Path) -> None:
    ranks = run_ranks(Path(__file__).with_name("interpreter_worker.py"), tmp_path / "seen")
    assert [rank["differ"][:1] for rank in ranks] == [[], []]
    assert all(rank["trainings"] >= 10 and rank["bitten"] for rank in ranks)
