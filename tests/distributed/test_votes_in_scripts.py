"""Ranks find each other's votes in scripts that start again, take part unevenly, or exchange sessions and groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Json, Ranks, run_ranks

pytestmark = pytest.mark.cover_children
# Seconds that ranks wait for one another's diagnosis.
LIMIT = 10


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    worker = Path(__file__).with_name("votes_in_scripts_worker.py")
    return run_ranks(worker, tmp_path_factory.mktemp("waiting") / "seen", words=["waiting"])


@pytest.mark.slow
def test_an_attempt_that_an_agent_starts_again_has_its_own_votes(
    waiting: list[Json],
) -> None:
    for rank in waiting:
        found = rank["restarted"]
        assert found["moved"] == [True, False, True]
        assert "notice" not in [kind for kind, *_ in found["events"]]


def test_experts_that_a_rank_does_not_use_leave_its_votes_alone(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        found = rank["experts"]
        assert found["moved"] == [True, True, False, True]
        assert [kind for kind, *_ in found["events"]] == ["trap", "skipped-step"]


def test_a_session_that_came_after_the_pass_does_not_skip_alone(
    ranks: Ranks,
) -> None:
    assert [rank["replaced_between"]["moved"] for rank in ranks] == [[True, True], [True, False]]
    error = ranks[1]["replaced_between"]["error"]
    assert "stopped on this rank before the update: the ranks did not vote on this" in error
    assert "0.own" in error
    assert not ranks[0]["replaced_between"]["error"]


def test_trips_of_different_ranks_in_a_row_are_given_up_together(
    ranks: Ranks,
) -> None:
    for number, rank in enumerate(ranks):
        found = rank["giving_up"]
        assert found["moved"] == [True, False, False, False]
        # Rank 1 trips first and last.
        assert "giving up: tripped 3 times in a row" in found["error"] or number == 0
        assert found["error"].startswith("step 3")


def test_the_rank_that_contributed_first_is_blamed(ranks: Ranks) -> None:
    for rank in ranks:
        (text,) = [text for kind, _, text in rank["accumulated"]["events"] if kind == "trap"]
        assert "; rank 1 contributed NaN or Inf" in text.partition("\n")[0]


def test_a_gradient_that_is_repaired_after_the_vote_is_not_called_no_trap(
    ranks: Ranks,
) -> None:
    for rank in ranks:
        found = rank["repaired"]
        assert found["moved"] == [False]
        assert [kind for kind, *_ in found["events"]] == ["skipped-step"]
        assert "rank 1 trapped, and all ranks skip the step" in found["events"][0][2]


@pytest.mark.slow
def test_each_rank_waits_for_one_diagnosis_and_not_for_the_next(
    waiting: list[Json],
) -> None:
    one, other = (rank["missed_meeting"] for rank in waiting)
    assert (one["moved"], other["moved"]) == ([True, False, False], [True, False])
    # Rank 0 waits for rank 1 once, which is absent, and rank 1 for rank 0 at its own first trip.
    assert one["took"] < 2 * LIMIT + 6
    assert other["took"] < 2 * LIMIT + 6


@pytest.mark.parametrize("part", ["in_another_order", "beside_a_thread"])
def test_ranks_do_not_wait_for_a_session_that_comes_later(ranks: Ranks, part: str) -> None:
    for rank in ranks:
        assert rank[part]["events"] == []
        assert rank[part]["took"] < LIMIT / 2
