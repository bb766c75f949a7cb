"""What one rank contributes, before it is reduced: rules do what hooks written by hand do."""

from __future__ import annotations

import pytest
from ranks import Ranks

CELLS = [
    ("DDP", "backward"),
    ("DDP", "output.grad"),
    ("DDP", "output"),
    ("FSDP2", "output.grad"),
    ("FSDP2", "output"),
]


@pytest.mark.cell(
    "DDP",
    "backward",
    "modules",
    differs="the rule sees this rank's own share, before the reduction",
)
@pytest.mark.cell(
    "FSDP2 (`fully_shard`)",
    "modules",
    differs="the rule sees this rank's own share, before the reduction",
)
@pytest.mark.parametrize(("kind", "what"), CELLS, ids=[" ".join(cell) for cell in CELLS])
def test_rules_do_what_hooks_do(ranks: Ranks, kind: str, what: str) -> None:
    for rank in ranks:
        hooks, rules, neither = (
            rank[f"{kind} {what} {hand}"] for hand in ("hooks", "rules", "neither")
        )
        assert rules["weights"] == hooks["weights"]
        assert rules["weights"] != neither["weights"]
        assert len(rules["norms"]) == 3
        assert rules["norms"] == pytest.approx(hooks["norms"], rel=1e-6)


@pytest.mark.parametrize(("kind", "what"), CELLS, ids=[" ".join(cell) for cell in CELLS])
def test_records_are_those_of_the_rank(ranks: Ranks, kind: str, what: str) -> None:
    # Two ranks have two halves of the batch, so that what they contribute differs.
    one, other = (rank[f"{kind} {what} rules"]["norms"] for rank in ranks)
    assert one != other
