"""The benchmark suite: its arithmetic, its tables, its check, and that each part of it runs. No timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Json

from benchmarks import (
    check,
    cli,
    formatting,
    measure,
    peers,
    readme,
    results,
    rule_sets,
    targets,
)
from benchmarks.cases import BARE

BARE_NAME = BARE.name


def row(workload: str, case: str, ratio: float, *, width: float = 0.0, **more: Any) -> Json:
    """Return a row of overhead whose ratios are all the same."""
    spread = {"median": ratio, "low": ratio - width, "high": ratio + width, "count": 100}
    found: Json = dict.fromkeys(
        ("step_ratio", "clip_ratio", "read_ratio", "reads_ratio", "base_us", "extra_us"), spread
    )
    found |= dict.fromkeys(("mean_extra_us", "peak_bytes", "allocations", "reads"), 0)
    kind = "baseline" if case == BARE_NAME else "rules"
    return {"group": "overhead", "workload": workload, "case": case, "kind": kind, **found, **more}


# Pages.


def test_what_is_generated_is_fresh() -> None:
    pages = readme.rendered(results.shown())
    assert {path.name for path in pages} == {"README.md"}
    assert len(pages) == 2
    for path, text in pages.items():
        remedy = f"{path}: run `python -m benchmarks --render`"
        assert path.read_text(encoding="utf-8") == text, remedy


def test_numbers_are_written_in_units_that_suit_them() -> None:
    assert formatting.duration(-1234) == "-1.23 ms"
    assert formatting.duration(2.5e6) == "2.50 s"
    assert formatting.size(-2_500_000) == "-2.50 MB"


def test_every_target_names_rows_that_are_measured() -> None:
    for path, result in results.shown():
        judged = targets.judged(result["rows"], result["machine"]["kind"])
        assert [
            one.target.what for one in judged if one.verdict == "not measured" and not one.why
        ] == [], path


def test_no_peer_is_missing_from_the_committed_results() -> None:
    for path, result in results.shown():
        assert "missing" not in result["versions"].values(), path
        found = {one["case"] for one in result["rows"] if one.get("kind") == "peer"}
        assert found == {case.name for case in peers.cases()}, path
        assert [one for one in result["rows"] if "skipped" in one] == [], path


# Arithmetic.


def test_numbers_are_compared_round_by_round() -> None:
    # The machine becomes twice as slow in the middle: the difference of medians would be 0.
    base, case = [10.0, 10.0, 20.0, 20.0], [11.0, 11.0, 22.0, 22.0]
    found = measure.compared(base, case)
    assert found["step_ratio"]["median"] == 1.1
    assert found["extra_us"] == {"median": 1.5, "low": 1.0, "high": 2.0, "count": 4}
    assert found["mean_extra_us"] == 1.5


def test_an_exponent_is_that_of_the_upper_decades() -> None:
    # A constant of 1,000 hides the growth of small sizes, and nothing of what comes later.
    points = [(size, 1_000 + size**2) for size in (1, 10, 10_000, 100_000, 1_000_000)]
    assert measure.exponent(points) == pytest.approx(2.0, abs=1e-3)
    assert measure.exponent([(10, 3.0), (100, 30.0)]) == pytest.approx(1.0)
    assert measure.exponent([(10, 3.0), (100, -1.0)]) is None
    assert measure.exponent([(1, 3.0), (1_000, 3.0)]) is None
    assert measure.exponent([]) is None


# Check.


BEFORE = [row("tiny", BARE_NAME, 0.0), row("tiny", "rules", 0.5), row("mlp", "rules", 1.2)]


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        ([row("tiny", "rules", 0.5), row("mlp", "rules", 1.2)], []),
        ([row("tiny", "rules", 0.56), row("mlp", "rules", 1.33)], ["tiny", "mlp"]),
        # The distance between the quartiles, and the bare step, say how much is noise.
        ([row("tiny", "rules", 0.56, width=0.02)], []),
        ([row("tiny", "rules", 0.56), row("tiny", BARE_NAME, 0.0, width=0.02)], []),
        ([row("mlp", "rules", 1.35), row("mlp", BARE_NAME, 1.0, width=0.02)], ["mlp"]),
        ([row("mlp", "rules nobody had", 9.0)], []),
        ([row("mlp", "rules", 9.0, kind="peer")], []),
    ],
)
def test_a_ratio_is_worse_beyond_noise(now: list[Any], worse: list[str]) -> None:
    assert [one.workload for one in check.compared(BEFORE, now) if one.worse] == worse


@pytest.mark.slow
def test_the_command_tells_a_doctored_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--only", "mlp", "--case", rule_sets.IDLE, "--device", "cpu"]
    now = tmp_path / "now.json"
    assert cli.main(["--quick", "--out", str(now), *chosen]) == 0
    result = results.load(now)
    assert [one["case"] for one in result["rows"]] == [BARE_NAME, rule_sets.IDLE]
    codes = []
    for factor in (10.0, 0.1):
        doctored = json.loads(now.read_text(encoding="utf-8"))
        ratio = doctored["rows"][1]["step_ratio"]
        ratio |= {key: ratio[key] * factor for key in ("median", "low", "high")}
        path = tmp_path / f"{factor}.json"
        path.write_text(results.dumps(doctored), encoding="utf-8")
        codes.append(cli.main(["--check", str(path), *chosen]))
    assert codes == [0, 1]
    out = capsys.readouterr().out
    assert "0 of 1 ratios are worse" in out
    assert "1 of 1 ratios are worse" in out
    assert out.count("| WORSE |") == 1


# Targets.


def verdicts(rows: list[Json], device: str = "cpu") -> dict[str, str]:
    return {one.target.what: one.why or one.verdict for one in targets.judged(rows, device)}


def test_targets_are_judged_by_their_medians() -> None:
    rows = [
        row("wide", rule_sets.OBSERVE, 1.1, width=0.5),
        row("tiny", rule_sets.OBSERVE, 1.01, width=0.1),
    ]
    found = verdicts(rows)
    assert found["observe everything, 12 M parameters"] == "met"
    assert found["observe everything, 200 tiny tensors"] == "missed"
    assert found["reading 1,000 rules"] == "not measured"
    assert found["waits for the device outside flush and trap"] == "not run: no CUDA device"
