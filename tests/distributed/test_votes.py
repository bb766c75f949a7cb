"""Scripts whose ranks do not all do the same: with a trap they come to what they come to without, and decide alike."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bounds import TIMEOUT
from distributed.patterns import ALIKE, DEADLY, FSDP2, ODD, STEPS, TRIP
from distributed.patterns_worker import HOSTS
from pairs import slow
from ranks import Json, run_ranks, start_ranks

pytestmark = pytest.mark.cover_children

HERE = Path(__file__).parent
LINGER = 10.0
# In the quick suite; the rest is slow.
QUICK = ("own_skip", "own_skip_batch_norm", "second_optimizer_on_rank_0", "fsdp2_own_skip")
# These are of two ranks, or their ranks come one after another to what only two can share.
ON_THREE = (
    *QUICK,
    "normal",
    "unused_parameters",
    "gan",
    "slow_update",
)
ON_A_MESH = ("hsdp", "hsdp_own_skip")
BY_HOSTS = ("normal", "own_skip", "fsdp2_own_skip")
REST = tuple(name for name in (*ALIKE, *FSDP2) if name not in QUICK)
# How many ranks run which patterns in one go, and on how many hosts.
GROUPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "quick": (2, QUICK),
    "rest": (2, REST),
    "three": (3, ON_THREE),
    "mesh": (4, ON_A_MESH),
    "hosts": (4, (HOSTS, *BY_HOSTS)),
}
Found = list[Json]
Case = tuple[str, str]


def cases(names: Iterable[str], *groups: str) -> list[Any]:
    """Return those of some patterns that are in some groups, each with its group."""
    found = [(group, name) for group in groups for name in GROUPS[group][1] if name in names]
    quick = [case for case in found if case[0] == "quick"]
    return [*quick, *slow(*(case for case in found if case not in quick))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """Return what runs the patterns of a group once, and returns by rank and pattern what came of them."""

    @cache
    def known(group: str) -> Found:
        ranks, names = GROUPS[group]
        out = tmp_path_factory.mktemp(group) / "found"
        return run_ranks(HERE / "patterns_worker.py", out, ranks, names)

    return known


def check(found: Found, name: str) -> None:
    """Check a pattern without a trip, and with one."""
    odd = "own_skip" in name
    for number, rank in enumerate(found):
        plain, quiet, trips = (rank[name][how] for how in ("plain", "quiet", "trips"))
        assert plain["error"] == quiet["error"] == trips["error"] == ""
        # The same bits, and nothing to tell.
        assert quiet["weights"] == plain["weights"]
        assert quiet["updates"] == plain["updates"]
        assert [kind for kind, *_ in quiet["events"]] == []
        assert quiet["took"] < plain["took"] + LINGER
        # The update after the pass that tripped is skipped by all that make it, and no other.
        assert trips["passes"] == plain["passes"]
        fed = min(passes for passes, _ in plain["updates"] if passes >= TRIP)
        skipped = [passes for passes, moved in trips["updates"] if passes and not moved]
        left_out = odd and number == 1
        again = name == "update_without_backward" and number == 1
        assert skipped == ([] if left_out else [fed] * (1 + again))
        kinds = [kind for kind, *_ in trips["events"] if kind != "notice"]
        assert ("skipped-step" in kinds) == (not left_out)
        if number != 1 and not name.startswith(("fsdp2", "hsdp", "tensor")):
            text = trips["events"][0][2]
            assert "rank 1 trapped, and all ranks skip the step: step " in text
            assert re.search(r"\n  > NaN +part\.own +4 elements\n", text)


def check_records(found: Found, name: str) -> None:
    """Check that records of shards change nothing, wait for nobody, and are norms of whole gradients."""
    for rank in found:
        plain, records = rank[name]["plain"], rank[name]["records"]
        assert records["error"] == ""
        for same in ("weights", "updates", "passes"):
            assert records[same] == plain[same]
        assert records["took"] < plain["took"] + LINGER
    plain, records = found[0][name]["plain"], found[0][name]["records"]
    # Rank 1 has not measured the update that it left out, nor the pass before it for another one.
    skips = ODD - 1 if "own_skip" in name else STEPS - 1 if "left_out" in name else None
    for at in ("accumulated", "step"):
        lost = skips if at == "step" or "own_skip" in name else None
        wanted = [(step, norm) for step, norm in enumerate(plain["norms"]) if step != lost]
        assert [step for step, _ in records["recorded"][at]] == [step for step, _ in wanted]
        for (_, norm), (_, exact) in zip(records["recorded"][at], wanted, strict=True):
            assert norm == pytest.approx(exact, rel=1e-5)
    assert {kind for kind, *_ in records["events"]} == ({"notice"} if skips is not None else set())


@pytest.mark.parametrize("case", cases((*FSDP2, *ON_A_MESH), "quick", "rest", "mesh"), ids="-".join)
def test_records_of_shards_wait_for_nobody(run: Callable[[str], Found], case: Case) -> None:
    group, name = case
    check_records(run(group), name)


@pytest.mark.parametrize("case", cases((*ALIKE, *FSDP2, *ON_A_MESH), *GROUPS), ids="-".join)
def test_all_ranks_decide_alike(run: Callable[[str], Found], case: Case) -> None:
    group, name = case
    check(run(group), name)


def end(folder: Path, name: str, how: str) -> tuple[list[int], list[Json], float]:
    """Return the exit codes of the ranks, what they came to, and how long it took."""
    start, out = time.monotonic(), folder / f"{name}-{how}"
    forks = start_ranks(HERE / "deadly_worker.py", out, 2, (name, how))
    codes = [fork.wait(TIMEOUT).returncode for fork in forks]
    found = [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in range(2)]
    return codes, found, time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("name", DEADLY)
def test_a_rank_that_ends_leaves_the_others_as_it_would_without_rules(
    name: str, tmp_path: Path
) -> None:
    codes, plain, took = end(tmp_path, name, "plain")
    assert any(codes) == (name in ("leaves_early", "killed", "exception_at_the_end"))
    quiet_codes, quiet, quiet_took = end(tmp_path, name, "quiet")
    assert (quiet_codes, quiet) == (codes, plain)
    assert quiet_took < took + LINGER + 2
    trip_codes, trips, _ = end(tmp_path, name, "trips")
    assert trip_codes == codes
    for rank in range(2):
        wanted = [passes for passes, _ in plain[rank]["updates"]]
        assert [passes for passes, _ in trips[rank]["updates"]] == wanted
        skipped = [passes for passes, moved in trips[rank]["updates"] if not moved]
        assert skipped == ([TRIP] if TRIP in wanted else [])
    assert STEPS > TRIP == ODD
