"""Two real ranks under DDP: the records of one process, and what is said of rules that see a rank alone."""

from __future__ import annotations

import pytest
from distributed.ddp_worker import NORMS, WORDS
from ranks import Ranks
from small import hold_rows

SETUPS = ["before", "after", "bucket views", "static graph", "unused", "no_sync"]


@pytest.mark.cell("DDP", "accumulated")
@pytest.mark.parametrize("setup", SETUPS)
def test_records_are_taken_after_the_reduction(ranks: Ranks, setup: str) -> None:
    wanted = ranks[0]["one process"]
    for rank in ranks:
        assert len(rank[setup]) == 4
        hold_rows(rank[setup], wanted, rel=1e-5)


AVERAGE = "bounds what each rank contributes, before DDP averages it"
SUM = "bounds the contribution of each backward pass, and several passes feed one update"
SAID = {
    "bound": [(0, AVERAGE)],
    "clip": [(0, AVERAGE)],
    "bound, later": [(2, AVERAGE)],
    # The first micro-batch is not averaged, the second one makes the sum.
    "bound, no_sync": [(0, SUM), (0, AVERAGE)],
    "bound on what is averaged": [(0, AVERAGE)],
}


@pytest.mark.cell(
    "DDP",
    "backward",
    differs="bounds each rank's contribution, not the average, with one warning; `scale` and `zero` mean the same as at `step`",
)
@pytest.mark.parametrize("kind", WORDS)
def test_a_bound_on_what_ddp_averages_is_told_of_once(ranks: Ranks, kind: str) -> None:
    wanted = SAID.get(kind, [])
    for rank in ranks:
        told = rank[f"words: {kind}"]
        assert [event[:3] for event in told["events"]] == [["notice", "r", at] for at, _ in wanted]
        for (*_, text), warned, (_, said) in zip(
            told["events"], told["warnings"], wanted, strict=True
        ):
            assert text.startswith(said)
            assert "`at: step`" in text
            assert warned == f"rule r: {text}"


@pytest.mark.cell(
    "DDP",
    "step",
    differs="a norm over both averaged and ignored parameters differs by rank, with one warning",
)
@pytest.mark.parametrize("kind", NORMS)
def test_one_norm_over_what_ddp_averages_and_leaves_alone_is_told_of_once(
    ranks: Ranks, kind: str
) -> None:
    for rank in ranks:
        told = rank[f"words: {kind}"]
        if not kind.endswith("over both"):
            assert told == {"events": [], "warnings": []}
            continue
        ((*event, text),) = told["events"]
        assert event == ["notice", "r", 0]
        assert text.startswith(
            "takes one norm over gradients that DDP averages and others (2.weight)"
        )
        assert told["warnings"] == [f"rule r: {text}"]
