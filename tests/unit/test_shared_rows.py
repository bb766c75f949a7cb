"""Rows of shards wait until the ranks that share them are found, within a limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradsurgeon.records import shared_rows
from gradsurgeon.records.shared_rows import PendingRow, SharedRows
from gradsurgeon.records.store import Key
from gradsurgeon.tensors import _job_store
from gradsurgeon.tensors._channel import Channel

dist: Any = torch.distributed
KEY = Key("norms", "l1", "accumulated", ("weight",))
ALONE = "nothing heard of rank 1"
UNRECORDED = f": this rank {shared_rows.UNRECORDED}"


@pytest.fixture(autouse=True)
def _job() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Search:
    """Finds the other rank when it is told to."""

    def __init__(self) -> None:
        self.found: Channel | str | None = None
        self.ends = 0

    def __call__(self, limit: float | None) -> Channel | str | None:
        if limit is None:
            self.ends += 1
            return ALONE
        assert limit == 0.0
        return self.found


def channel(rank: int) -> Channel:
    connection = _job_store.Connection(_job_store.store())
    connection.rank = rank
    return Channel("rows", (0, 1), connection)


class Rank:
    """The rows of one of two ranks, and what was told of them."""

    def __init__(self, number: int) -> None:
        self.told: list[str] = []
        self.rows = SharedRows(lambda _topic, _rule, text: self.told.append(text))
        self.search = Search()
        self.rows.seek(self.search)
        self.rows._rank = number
        self.passes = 0

    def measure(self, number: float) -> None:
        row = PendingRow(KEY, self.passes, [0], shares={(0, 1): [0]}, number=self.passes)
        self.rows.add(row, torch.tensor([[number]]))
        self.passes += 1

    def recorded(self) -> list[float]:
        return [float(numbers) for _, numbers in self.rows.exchange()]


def test_rows_that_came_before_the_other_rank_was_found_are_merged() -> None:
    leader, other = Rank(0), Rank(1)
    for number in (1.0, 2.0):
        leader.measure(number)
        other.measure(10 * number)
        assert leader.recorded() == other.recorded() == []
    # The ranks find each other one after the other.
    other.search.found = channel(1)
    assert other.recorded() == leader.recorded() == []
    leader.search.found = channel(0)
    assert leader.recorded() == [11.0, 22.0]
    assert leader.told == other.told == []


def test_a_rank_with_other_rules_is_told_and_not_waited_for() -> None:
    leader = Rank(0)
    leader.measure(1.0)
    leader.search.found = "rank 1 has other rules"
    assert leader.recorded() == []
    assert leader.told == [f"rank 1 has other rules{UNRECORDED}"]
    assert list(leader.rows.close()) == []


def test_the_search_ends_when_too_many_rows_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rows, "_MOST_WAITING", 4)
    leader = Rank(0)
    for _ in range(3):
        leader.measure(1.0)
        assert leader.recorded() == []
    assert leader.search.ends == 0
    leader.measure(1.0)
    assert leader.recorded() == []
    assert leader.search.ends == 1
    assert leader.told == [ALONE + UNRECORDED]


@pytest.mark.parametrize("measures", [True, False])
def test_the_end_of_a_session_ends_the_search(*, measures: bool) -> None:
    leader = Rank(0)
    if measures:
        leader.measure(1.0)
    assert list(leader.rows.close()) == []
    assert leader.search.ends == 1
    # Without a row nothing is lost.
    assert leader.told == [ALONE + UNRECORDED] * measures


def test_a_number_of_all_is_missed_where_several_ranks_merge_parts() -> None:
    key = Key("all", "l1", "accumulated", ("weight", "bias"))
    joined = Key("all", "l1", "accumulated", ("all",))
    # Rank 0 merges the first tensor. Rank 1 merges the second one, or has it whole as rank 0 has.
    for ranks, told in (((1,), [shared_rows._APART]), ((), [])):
        other = Rank(1)
        other.search.found = channel(1)
        row = PendingRow(key, 0, [0, 1], shares={(0, 1): [0], ranks: [1]}, joined=joined)
        other.rows.add(row, torch.tensor([[1.0], [2.0]]))
        assert other.recorded() == []
        assert other.told == told
