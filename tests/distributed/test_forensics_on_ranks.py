"""A fault of one rank is diagnosed there, and told everywhere; a replay never waits for another rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed.forensics_worker import FAULT, STEPS
from ranks import run_ranks

pytestmark = pytest.mark.cover_children
BORN = "diagnosis (reproduced): NaN born in the forward pass of body (Body): aten.log"
NOBODY = "diagnosis: not reproduced, and nobody is blamed"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    worker = Path(__file__).with_name("forensics_worker.py")
    return run_ranks(worker, tmp_path_factory.mktemp("forensics") / "seen")


@pytest.mark.parametrize("then", ["raise", "skip-step"])
def test_the_rank_that_did_it_names_the_operation(ranks: list[dict[str, Any]], then: str) -> None:
    innocent, guilty = (rank[f"DDP {then}"] for rank in ranks)
    assert BORN in guilty["told"][0]
    # Its own calls were finite: the average was not.
    assert f"{NOBODY}\n  because rank 1 contributed what is not finite" in innocent["told"][0]
    assert guilty["step"] == innocent["step"] == (FAULT if then == "raise" else STEPS - 1)
    if then == "raise":
        assert BORN in guilty["error"]


@pytest.mark.parametrize("then", ["raise", "skip-step"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("FSDP2", "the parameters are divided over ranks"),
        ("gathered", "talks to other ranks, which do not take part in the replay"),
    ],
)
def test_what_needs_all_ranks_is_not_run_again(
    ranks: list[dict[str, Any]], kind: str, reason: str, then: str
) -> None:
    for rank in ranks:
        seen = rank[f"{kind} {then}"]
        assert seen["step"] == (FAULT if then == "raise" else STEPS - 1)
        assert NOBODY in seen["told"][0]
    assert reason in ranks[1][f"{kind} {then}"]["told"][0]
