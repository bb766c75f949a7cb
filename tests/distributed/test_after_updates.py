"""Updates that several ranks share have one norm, and so has what their optimizers keep."""

from __future__ import annotations

import pytest
import torch
from distributed.after_updates_worker import FACTORS, KINDS, STATS
from ranks import Json, Ranks
from small import hold_rows


def _hold_weights(found: Json, wanted: Json) -> None:
    for ours, theirs in zip(found["weights"], wanted["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("per", ["rule", "parameter"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_clip_the_update_of_the_whole_weight(ranks: Ranks, kind: str, per: str) -> None:
    for rank in ranks:
        _hold_weights(rank[f"{kind}, {per}"], rank[f"by hand, {per}"])
        events = rank[f"{kind}, {per}"]["events"]
        assert events == ranks[0][f"one process, {per}"]["events"]
        assert {event[0] for event in events} == {"spike"}


@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_an_optimizer_keeps_is_recorded_of_the_whole_weight(ranks: Ranks, kind: str) -> None:
    wanted = ranks[0]["one process, kept"]["records"]
    assert len(wanted) == 2 * len(STATS) * len(ranks[0]["by hand, rule"]["weights"])
    # Shares of a sharded parameter are recorded by the lowest rank that has one.
    found = ranks[0][f"{kind}, kept"]["records"]
    for key, rows in wanted.items():
        assert len(rows) == len(FACTORS)
        hold_rows(found[key], rows)
