"""A user's own actions and statistics mean on two ranks what they mean in one process."""

from __future__ import annotations

import pytest
from ranks import Ranks


@pytest.mark.parametrize("setup", ["DDP", "FSDP2"])
def test_the_end_is_that_of_one_process(ranks: Ranks, setup: str) -> None:
    for rank in ranks:
        wanted, found = rank["one process"], rank[setup]
        assert found["fired"] == wanted["fired"]
        assert len(found["copies"]) == len(wanted["copies"]) == 3
        for what in ("weights", "copies"):
            for left, right in zip(found[what], wanted[what], strict=True):
                assert left == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("setup", ["DDP", "FSDP2"])
def test_statistics_are_of_the_whole_gradient(ranks: Ranks, setup: str) -> None:
    for rank in ranks:
        wanted, found = rank["one process"]["records"], rank[setup]["records"]
        assert found.keys() == wanted.keys()
        for key, values in wanted.items():
            assert len(values) == 3
            assert found[key] == pytest.approx(values, rel=1e-4, abs=1e-7), key


@pytest.mark.parametrize("setup", ["DDP", "FSDP2"])
def test_a_trap_by_a_statistic_decides_alike(ranks: Ranks, setup: str) -> None:
    for rank in ranks:
        wanted, found = rank["one process"]["trapped"], rank[setup]["trapped"]
        assert [step for step, _ in wanted["events"]] == [1]
        assert found["events"] == wanted["events"]
        for left, right in zip(found["weights"], wanted["weights"], strict=True):
            assert left == pytest.approx(right, abs=1e-6)
