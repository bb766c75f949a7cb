"""`check-ranks` names ranks that differ and should not, with a remedy, and says nothing of ranks that may differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed.faulty_ranks import FAULTY
from distributed.healthy_ranks import HEALTHY
from ranks import Json, run_ranks

pytestmark = pytest.mark.slow

Found = list[dict[str, list[Json]]]


def trained(folder: Path, ranks: int) -> Found:
    worker = Path(__file__).with_name("checks_worker.py")
    return run_ranks(worker, folder / "seen", ranks)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return trained(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return trained(tmp_path_factory.mktemp("four"), 4)


@pytest.mark.parametrize("name", HEALTHY[2])
def test_ranks_that_may_differ_get_no_finding(two: Found, name: str) -> None:
    assert [rank[name] for rank in two] == [[], []]


@pytest.mark.parametrize("name", HEALTHY[4])
def test_four_ranks_that_may_differ_get_no_finding(four: Found, name: str) -> None:
    assert [rank[name] for rank in four] == [[], [], [], []]


@pytest.mark.parametrize("name", FAULTY[2])
def test_a_fault_is_told_with_its_place_and_a_remedy(two: Found, name: str) -> None:
    told_first(two, name)


@pytest.mark.parametrize("name", FAULTY[4])
def test_a_fault_among_four_ranks(four: Found, name: str) -> None:
    told_first(four, name)


def told_first(ranks: Found, name: str) -> None:
    fault = FAULTY[len(ranks)][name]
    # The first of the ranks that should be alike compares them.
    assert [number for number, rank in enumerate(ranks) if rank[name]] == [fault.rank]
    first = ranks[fault.rank][name][0]
    assert (first["step"], first["name"]) == (fault.step, fault.name)
    for part in fault.parts:
        assert part in first["message"]


def test_weights_are_told_after_the_gradient_that_was_lost(two: Found) -> None:
    first, second = two[0]["data_lost_by_hand"]
    assert "0.bias" not in first["message"]
    assert second["step"] > 15
    assert "ranks 0, 1 differ in the weights 0.weight" in second["message"]


def test_parts_of_parameters_that_do_not_move(two: Found) -> None:
    for rank in two:
        (event,) = rank["sharded_at_rest"]
        assert event["name"] == "0.weight"
        assert "0.weight, 0.bias did not move in 10 updates" in event["message"]
        assert "no optimizer that has stepped owns them" in event["message"]
