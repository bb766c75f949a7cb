"""`check-ranks` names ranks that differ and should not, with a remedy, and says nothing of ranks that may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from distributed.faulty_ranks import FAULTY
from distributed.healthy_ranks import HEALTHY
from pairs import slow
from ranks import run_ranks

pytestmark = pytest.mark.slow

Found = list[dict[str, list[dict[str, Any]]]]
# Of each kind of training, and of each kind of fault, one; the others are slow. So are shards: the rank that leaves
# first waits ten seconds for rows of the others.
QUICK = [
    "accumulating",
    "group_of_its_own",
    "skipping_together",
    "sweep_of_learning_rates",
    "training_before_the_wrapper",
    "bypassed",
    "layer_replaced_after_the_wrapper",
    "one_rank_clips",
    "unlike_from_the_start",
    "weight_changed_on_one_rank",
]


def every(names: Sequence[str]) -> list[Any]:
    """Return the names, of which most are slow."""
    quick = [name for name in names if name in QUICK]
    return [*quick, *slow(*(name for name in names if name not in QUICK))]


def trained(names: Sequence[str], folder: Path, ranks: int = 2) -> Found:
    worker = Path(__file__).with_name("checks_worker.py")
    return run_ranks(worker, folder / "seen", ranks, names)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return trained(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Found:
    names = [name for name in (*HEALTHY[2], *FAULTY[2]) if name not in QUICK]
    return trained([*names, "sharded_at_rest"], tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return trained([*HEALTHY[4], *FAULTY[4]], tmp_path_factory.mktemp("four"), 4)


@pytest.fixture
def of_two(request: pytest.FixtureRequest) -> Callable[[str], Found]:
    def found(name: str) -> Found:
        ranks: Found = request.getfixturevalue("quick" if name in QUICK else "others")
        return ranks

    return found


@pytest.mark.parametrize("name", every([*HEALTHY[2]]))
def test_ranks_that_may_differ_get_no_finding(of_two: Callable[[str], Found], name: str) -> None:
    assert [rank[name] for rank in of_two(name)] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY[4])
def test_four_ranks_that_may_differ_get_no_finding(four: Found, name: str) -> None:
    assert [rank[name] for rank in four] == [[], [], [], []]


@pytest.mark.parametrize("name", every([*FAULTY[2]]))
def test_a_fault_is_told_with_its_place_and_a_remedy(
    of_two: Callable[[str], Found], name: str
) -> None:
    told_first(of_two(name), name)


@pytest.mark.slow
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


@pytest.mark.slow
def test_weights_are_told_after_the_gradient_that_was_lost(others: Found) -> None:
    first, second = others[0]["data_lost_by_hand"]
    assert "0.bias" not in first["message"]
    assert second["step"] > 15
    assert "ranks 0, 1 differ in the weights 0.weight" in second["message"]


@pytest.mark.slow
def test_parts_of_parameters_that_do_not_move(others: Found) -> None:
    for rank in others:
        (event,) = rank["sharded_at_rest"]
        assert event["name"] == "0.weight"
        assert "0.weight, 0.bias did not move in 10 updates" in event["message"]
        assert "no optimizer that has stepped owns them" in event["message"]
