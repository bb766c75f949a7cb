"""Scripts whose ranks do not all do the same: with a trap they come to what they come to without, and decide alike."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from bounds import TIMEOUT
from distributed.patterns import ALIKE, DEADLY, FSDP2, ODD, STEPS, TRIP
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
    "all_gather_on_either_side",
    "slow_update",
)
BY_HOSTS = ("normal", "own_skip", "fsdp2_own_skip")
Found = list[Json]


def run(folder: Path, names: tuple[str, ...], ranks: int = 2) -> Found:
    """Run patterns, and return by rank and pattern what came of them."""
    return run_ranks(HERE / "patterns_worker.py", folder / "found", ranks, names)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Found:
    names = tuple(name for name in (*ALIKE, *FSDP2) if name not in QUICK)
    return run(tmp_path_factory.mktemp("rest"), names)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(tmp_path_factory.mktemp("three"), ON_THREE, 3)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(tmp_path_factory.mktemp("four"), ("hsdp", "hsdp_own_skip"), 4)


@pytest.fixture(scope="module")
def on_two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(tmp_path_factory.mktemp("hosts"), ("--hosts", *BY_HOSTS), 4)


def check(found: Found, name: str) -> None:
    """Check a pattern without a trip, and with one."""
    odd = "own_skip" in name or name == "exception_before_update"
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


@pytest.mark.parametrize("name", [name for name in QUICK if name in FSDP2])
def test_records_of_shards_wait_for_nobody(quick: Found, name: str) -> None:
    check_records(quick, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FSDP2 if name not in QUICK])
def test_records_of_shards_wait_for_nobody_in_every_pattern(rest: Found, name: str) -> None:
    check_records(rest, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hsdp", "hsdp_own_skip"])
def test_records_of_a_mesh_wait_for_nobody(on_four: Found, name: str) -> None:
    check_records(on_four, name)


@pytest.mark.parametrize("name", QUICK)
def test_all_ranks_decide_alike(quick: Found, name: str) -> None:
    check(quick, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*ALIKE, *FSDP2) if name not in QUICK])
def test_all_ranks_decide_alike_in_every_pattern(rest: Found, name: str) -> None:
    check(rest, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_THREE)
def test_three_ranks_decide_alike(on_three: Found, name: str) -> None:
    check(on_three, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hsdp", "hsdp_own_skip"])
def test_ranks_of_a_mesh_decide_alike(on_four: Found, name: str) -> None:
    check(on_four, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_HOSTS)
def test_ranks_of_several_hosts_decide_alike(on_two_hosts: Found, name: str) -> None:
    check(on_two_hosts, name)


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
