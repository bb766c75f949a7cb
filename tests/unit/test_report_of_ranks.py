"""How far each rank came: in the text of a report, on the screen of `watch`, and on the page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from runs import write

from gradsurgeon.cli.watch import newest_report, screen
from gradsurgeon.records.store.run import open_run
from gradsurgeon.report.json_form import to_dict
from gradsurgeon.report.ranks import RankProgress, rank_lines
from gradsurgeon.report.web_page import page_data

NOON = datetime(2030, 1, 1, 12).astimezone().timestamp()  # local, as it is shown


def test_report_screen_and_page_say_which_rank_lags(tmp_path: Path) -> None:
    writers = [
        write(tmp_path, {"a": [1.0] * steps}, rank=rank) for rank, steps in enumerate((9, 4))
    ]
    for writer in writers:
        writer.close()
    for rank in range(2):
        os.utime(tmp_path / f"rank-{rank}.db", (NOON, NOON - 60 * rank))
    expected = [
        "rank 1: last record of step 3 at 2030-01-01 11:59:00, 5 steps behind",
        "rank 0: last record of step 8 at 2030-01-01 12:00:00",
    ]
    with open_run(tmp_path) as run:
        assert page_data(run)["notes"][-2:] == expected
    report = newest_report(tmp_path)
    assert to_dict(report)["ranks"] == [
        {"rank": 0, "step": 8, "written": NOON, "behind": 0},
        {"rank": 1, "step": 3, "written": NOON - 60, "behind": 5},
    ]
    assert str(report).splitlines()[2:4] == expected
    assert screen(report, 200)[2:4] == expected


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
