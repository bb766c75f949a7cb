"""How far each rank came: in the text of a report, on the screen of `watch`, and on the page."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gradsurgeon.report.ranks import RankProgress, rank_lines


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([7], []),
        ([7, 7], ["rank 0, 1: last record of step 7"]),
        ([None, 0], ["rank 0: no record yet, 1 step behind", "rank 1: last record of step 0"]),
        ([5] * 10, ["rank 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: last record of step 5"]),
        # Of many ranks, those that lag most.
        (list(range(9)), [f"rank {rank}: last record of step {rank}, {8 - rank} steps behind" for rank in range(4)]),
    ],
)  # fmt: skip
def test_ranks_alike_share_a_line(steps: Sequence[int | None], expected: list[str]) -> None:
    furthest = max(-1 if step is None else step for step in steps)
    ranks = []
    for rank, step in enumerate(steps):
        behind = furthest - (-1 if step is None else step)
        ranks.append(RankProgress(rank, step, None, behind))
    assert list(rank_lines(ranks)) == expected
