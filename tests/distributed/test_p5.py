"""A threshold means what it says: every set-up ends with the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from distributed.p5_worker import ACTIONS, PROCESSES, VARIANTS
from pairs import covering, rows, slow
from ranks import Weights, largest_difference, run_ranks

TOLERANCE = 1e-6
Ends = list[dict[str, Weights]]
# The quick suite has every process, variant and action in a case, the slow suite every pair of them.
PAIRS = rows([list(PROCESSES), list(VARIANTS), list(ACTIONS)])


def cases(chosen: list[tuple[int, ...]]) -> list[tuple[str, str, str]]:
    """Return the process, variant and action of each case."""
    return [(PROCESSES[i], VARIANTS[j], list(ACTIONS)[k]) for i, j, k in chosen]


QUICK = cases(covering(PAIRS))
GROUPS = {"quick": QUICK, "rest": [case for case in cases(PAIRS) if case not in QUICK]}
CASES = [
    *(("quick", *case) for case in QUICK),
    *slow(*(("rest", *case) for case in GROUPS["rest"])),
]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ends]:
    """Return what trains a group of cases once, and returns by rank the weights at the end of each training."""

    @cache
    def known(group: str) -> Ends:
        words = [" | ".join(case) for case in GROUPS[group]]
        out = tmp_path_factory.mktemp(group) / "ends"
        return run_ranks(Path(__file__).with_name("p5_worker.py"), out, words=words)

    return known


@pytest.mark.cell("one process", "step")
@pytest.mark.cell("one process, fused optimizer", "step")
@pytest.mark.cell("accumulation", "step")
@pytest.mark.cell("GradScaler", "step")
@pytest.mark.cell("GradScaler, fused optimizer", "step")
@pytest.mark.cell("GradScaler and accumulation", "step")
@pytest.mark.cell("DDP", "step")
@pytest.mark.cell("FSDP2 (`fully_shard`)", "step")
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_step_rules_mean_the_same(
    ends: Callable[[str], Ends], case: tuple[str, str, str, str]
) -> None:
    group, process, variant, action = case
    wanted = ends(group)[0][f"one process | plain | {action}"]
    for rank in ends(group):
        found = rank[f"{process} | {variant} | {action}"]
        bare = rank[f"{process} | {variant} | no rules"]
        assert largest_difference(found, wanted) < TOLERANCE
        # A rule that does nothing would pass as well.
        assert largest_difference(found, bare) > 100 * TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("process", PROCESSES)
def test_the_set_ups_themselves_agree(
    ends: Callable[[str], Ends], process: str, variant: str
) -> None:
    wanted = ends("quick")[0]["one process | plain | no rules"]
    for rank in ends("quick"):
        found = rank[f"{process} | {variant} | no rules"]
        assert largest_difference(found, wanted) < TOLERANCE
