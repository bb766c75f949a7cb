"""`check-ranks` on two ranks: it names what differs, and nothing where ranks may differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    worker = Path(__file__).with_name("checks_worker.py")
    return run_ranks(worker, tmp_path_factory.mktemp("checks") / "seen")


@pytest.mark.parametrize(
    "case",
    [
        "healthy",
        "healthy_by_hand",
        "accumulating",
        "sweep",
        "sharded",
        "own_layer",
        "parting",
        "skipping_together",
    ],
)
def test_ranks_that_may_differ_get_no_finding(ranks: list[dict[str, Any]], case: str) -> None:
    assert [rank[case] for rank in ranks] == [[], []]


def only(ranks: list[dict[str, Any]], case: str) -> dict[str, Any]:
    """Return the one finding, which the first rank tells."""
    assert ranks[1][case] == []
    (event,) = ranks[0][case]
    found: dict[str, Any] = event
    return found


def test_a_forward_pass_around_the_wrapper(ranks: list[dict[str, Any]]) -> None:
    event = only(ranks, "bypassed")
    assert event["step"] == 0
    assert "ranks 0, 1 differ in the gradients of 0.weight" in event["message"]
    assert "call the wrapper in the forward pass, not `model.module`" in event["message"]


def test_a_device_that_lost_data_once(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks[0]["lost"]
    assert (first["step"], first["name"]) == (15, "0.weight")
    assert "0.bias" not in first["message"]
    assert "and 0 on rank 1" in first["message"]
    # Since then the weights have been apart.
    assert second["step"] > 15
    assert "ranks 0, 1 differ in the weights 0.weight" in second["message"]


def test_weights_that_differ_from_the_start(ranks: list[dict[str, Any]]) -> None:
    event = only(ranks, "unlike_from_the_start")
    assert event["name"] == "3.weight"
    assert "Broadcast the weights of rank 0" in event["message"]


def test_weights_that_one_rank_changes(ranks: list[dict[str, Any]]) -> None:
    event = only(ranks, "drifting")
    assert (event["step"], event["name"]) == (21, "3.weight")
    assert "an assignment that only some ranks make" in event["message"]


def test_an_update_that_one_rank_skips(ranks: list[dict[str, Any]]) -> None:
    """Its gradients are alike: they are those of the same pass, though not of the same update."""
    event = only(ranks, "skipping")
    assert 21 <= event["step"] <= 22
    assert "ranks 0, 1 differ in the weights 0.weight" in event["message"]
    assert (
        "an update, a weight decay or an assignment that only some ranks make" in event["message"]
    )


def test_parts_of_parameters_that_do_not_move(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        (event,) = rank["sharded_at_rest"]
        assert event["name"] == "0.weight"
        assert "0.weight, 0.bias did not move in 10 updates" in event["message"]
        assert "no optimizer that has stepped owns them" in event["message"]
