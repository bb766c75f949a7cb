"""The benchmark suite: its tables and its check. No timing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import (
    cli,
    overhead,
    peers,
    readme,
    results,
    rule_sets,
    targets,
    throughput,
)
from benchmarks.cases import BARE


def test_what_is_generated_is_fresh() -> None:
    pages = readme.rendered(results.shown())
    assert {path.name for path in pages} == {"README.md"}
    assert len(pages) == 2
    for path, text in pages.items():
        remedy = f"{path}: run `python -m benchmarks --render`"
        assert path.read_text(encoding="utf-8") == text, remedy


def test_every_target_names_rows_that_are_measured() -> None:
    for path, result in results.shown():
        if result["machine"]["kind"] == "cuda":
            continue  # only a part of the suite has run there
        judged = targets.judged(result["rows"], result["machine"]["kind"])
        assert [
            one.target.what for one in judged if one.verdict == "not measured" and not one.why
        ] == [], path


def test_no_peer_is_missing_from_the_committed_results() -> None:
    for path, result in results.shown():
        rows = [one for one in result["rows"] if one["group"] == overhead.GROUP]
        found = {one["case"] for one in rows if one["kind"] == "peer"}
        assert found == {case.name for case in peers.cases()}, path
        missing = [one for one, release in result["versions"].items() if release == "missing"]
        skipped = {one["skipped"].split()[1].rstrip(":") for one in rows if "skipped" in one}
        assert skipped == set(missing), path
        assert not missing or result["machine"]["kind"] == "cuda", path


def test_runs_are_merged_by_what_their_rows_are_of(tmp_path: Path) -> None:
    ((path, result),) = [one for one in results.shown() if one[1]["machine"]["kind"] == "cuda"]
    again = [{**result["rows"][0], "mean_extra_us": 1.0}]
    parts = [result["rows"][:40], result["rows"][40:], again]
    files = [tmp_path / f"{number}.json" for number in range(len(parts))]
    for file, rows in zip(files, parts, strict=True):
        file.write_text(results.dumps(result | {"rows": rows}), encoding="utf-8")
    out = tmp_path / "out.json"
    assert cli.main(["--merge", *map(str, files), "--out", str(out)]) == 0
    merged = results.load(out)
    assert merged["rows"] == [*again, *result["rows"][1:]]
    files[0].write_text(results.dumps(result | {"machine": {}}), encoding="utf-8")
    assert cli.main(["--merge", str(path), str(files[0]), "--out", str(out)]) == 2
    assert results.load(out) == merged


@pytest.mark.slow
def test_a_group_is_measured_on_the_workload_that_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--quick", "--only", "throughput", "--only", "mlp", "--device", "cpu"]
    assert cli.main([*words, "--out", str(out)]) == 0
    rows = results.load(out)["rows"]
    assert {row["group"] for row in rows} == {throughput.GROUP}
    assert {row["workload"] for row in rows} == {"mlp, AdamW", "mlp, AdamW(fused=True)"}
    assert {rule_sets.PACK, rule_sets.FINGERPRINT} < {row["case"] for row in rows}


@pytest.mark.slow
def test_the_command_tells_a_doctored_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--only", "mlp", "--case", rule_sets.IDLE, "--device", "cpu"]
    now = tmp_path / "now.json"
    assert cli.main(["--quick", "--out", str(now), *chosen]) == 0
    result = results.load(now)
    assert [one["case"] for one in result["rows"]] == [BARE.name, rule_sets.IDLE]
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
