"""`check-ranks` names ranks that differ and should not, with a remedy, and says nothing of ranks that may differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from distributed.faulty_ranks import FAULTY
from distributed.healthy_ranks import HEALTHY
from ranks import Json, run_ranks

pytestmark = pytest.mark.slow

Found = list[dict[str, list[Json]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    """Return by the number of ranks what each of them was told."""
    worker = Path(__file__).with_name("checks_worker.py")
    folder = tmp_path_factory.mktemp("checks")
    return {ranks: run_ranks(worker, folder / str(ranks), ranks) for ranks in HEALTHY}


def cases(known: Mapping[int, Iterable[str]]) -> list[tuple[int, str]]:
    return [(ranks, name) for ranks in known for name in known[ranks]]


@pytest.mark.parametrize(("ranks", "name"), cases(HEALTHY))
def test_ranks_that_may_differ_get_no_finding(
    trained: dict[int, Found], ranks: int, name: str
) -> None:
    # A full batch in each step is a fact, whatever the number of ranks.
    findings = [[each for each in rank[name] if each["kind"] != "fact"] for rank in trained[ranks]]
    assert findings == [[]] * ranks


@pytest.mark.parametrize(("ranks", "name"), cases(FAULTY))
def test_a_fault_is_told_with_its_place_and_a_remedy(
    trained: dict[int, Found], ranks: int, name: str
) -> None:
    fault = FAULTY[ranks][name]
    told = [rank[name] for rank in trained[ranks]]
    # The first of the ranks that should be alike compares them.
    assert [number for number, findings in enumerate(told) if findings] == [fault.rank]
    first = told[fault.rank][0]
    assert (first["step"], first["name"]) == (fault.step, fault.name)
    for part in fault.parts:
        assert part in first["message"]


def test_weights_are_told_after_the_gradient_that_was_lost(trained: dict[int, Found]) -> None:
    first, second = trained[2][0]["data_lost_by_hand"]
    assert "0.bias" not in first["message"]
    assert second["step"] > 15
    assert "ranks 0, 1 differ in the weights 0.weight" in second["message"]


def test_parts_of_parameters_that_do_not_move(trained: dict[int, Found]) -> None:
    for rank in trained[2]:
        (event,) = rank["sharded_at_rest"]
        assert event["name"] == "0.weight"
        assert "0.weight, 0.bias did not move in 10 updates" in event["message"]
        assert "no optimizer that has stepped owns them" in event["message"]


def test_one_batch_on_all_ranks_is_a_fact(trained: dict[int, Found]) -> None:
    facts = trained[2][0]["one_batch"]
    (event,) = [fact for fact in facts if "same data" in fact["message"]]
    assert event["kind"] == "fact"
    # The first update may have been compared, too.
    assert event["step"] in (9, 10)
    assert event["message"].startswith("ranks 0, 1 trained on the same data in 10 updates in a row")
    assert not any("same data" in fact["message"] for fact in trained[2][1]["one_batch"])
