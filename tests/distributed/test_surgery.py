"""Edits of rows, elements, groups, weights and updates mean on two ranks what they mean in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Json, Ranks
from surgery import ACTIONS, OF_ROWS, ON_RANKS

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]


def largest_gap(one: Json, other: Json) -> float:
    assert one.keys() == other.keys()
    gaps: list[float] = [
        abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True)
    ]
    return max(gaps)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("setup", ON_RANKS)
def test_ranks_train_as_one_process_under_the_same_rule(
    ranks: Ranks, action: str, setup: str
) -> None:
    same, bare = "one process", "no rules"
    if setup == "tensor parallel":
        same, bare = "one block", "no rules on a block"
    for rank in ranks:
        found = rank[action]
        assert largest_gap(found[setup], found[same]) < 1e-6
        assert largest_gap(found[same], found[bare]) > 5e-5


def test_a_number_of_all_gradients_is_there_though_one_layer_is_sharded(ranks: Ranks) -> None:
    found = ranks[0]["partly"]
    steps = [step for step, _ in found["whole"]]
    assert steps == [step for step, _ in found["partly"]] == [0, 1, 2]
    norms = [norm for _, norm in found["whole"]]
    assert [norm for _, norm in found["partly"]] == pytest.approx(norms, rel=1e-5)
    for rank in ranks:
        assert rank["partly"]["partly told"] == []


@pytest.mark.parametrize("action", OF_ROWS)
def test_divided_rows_are_refused_at_binding_by_place_and_name(ranks: Ranks, action: str) -> None:
    for rank in ranks:
        place, _, complaint = rank["divided rows"][action].partition(": ")
        assert Path(place.split(":")[0]).suffix == ".yaml"
        assert complaint == (
            "rule it: down.weight: its rows are divided over ranks, and no rank has one whole: "
            "leave it out by `exclude`"
        )


def test_of_shards_a_vector_is_refused_and_a_matrix_is_not(ranks: Ranks) -> None:
    for rank in ranks:
        assert ": rule it: 0.bias: its rows are divided" in rank["divided rows"]["vector"]
