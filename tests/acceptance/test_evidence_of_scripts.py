"""What is told of a recorded script is what the same rules counted while it ran, exactly."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from commands import ROOT
from outside import Folder

import gradsurgeon
from gradsurgeon.cli.review import on_run
from gradsurgeon.language.planning import MatchedRules, Matcher
from gradsurgeon.report.evidence import run_norms

pytestmark = pytest.mark.slow

RULES = """\
version: 1
rules:
  - {id: after, action: norm-log, params: "*"}
  - {id: final, action: norm-log, params: "*", at: step, stats: [l2, linf]}
  - {id: trap, action: nan-trap, params: "*", then: warn}
  - {id: spikes, action: spike-trap, params: "*", above: {sigmas: 0.5, warmup: 2}, then: warn}
  - {id: each-spike, action: spike-trap, params: "*.weight", above: {times: 1.05, warmup: 2}, per: parameter}
  - {id: one-norm, action: clip-norm, params: "*", per: rule, max_norm: 0.2}
  - {id: each, action: clip-norm, params: "*.weight", per: parameter, max_norm: 0.1}
  - {id: flat, action: clip-norm, params: "*.bias", per: parameter, norm_type: inf, max_norm: 0.02}
  - {id: still, action: freeze, params: "*.bias", steps: {from: 1, to: 4}}
  - {id: without, action: zero, params: "*.bias", at: step, steps: {every: 2}}
  - {id: half, action: scale, params: "*.weight", at: step, factor: 0.5, steps: {from: 2}}
  - {id: bound, action: clamp, params: "*.weight", at: step, min: -0.02, max: 0.02}
"""


@pytest.mark.parametrize(
    ("words", "ranks", "runs", "silent"),
    [
        (["gan.py"], 0, 2, {"trap"}),
        (["scaled.py"], 0, 1, {"trap"}),
        # Its norms only fall.
        (["ddp.py", "8"], 2, 1, {"trap", "spikes", "each-spike"}),
    ],
    ids=["two optimizers", "scaler", "ranks"],
)
def test_counts_are_those_of_the_run(
    tmp_path: Path, words: list[str], ranks: int, runs: int, silent: set[str]
) -> None:
    shutil.copytree(ROOT / "tests" / "scripts", tmp_path, dirs_exist_ok=True)
    (tmp_path / "rules.yaml").write_text(RULES)
    options = ("--observe", "--record", "run", "--rules", "rules.yaml")
    done = Folder(tmp_path).fork("-m", "gradsurgeon", "run", *options, *words, ranks=ranks)
    assert done.code == 0, done.err
    folders = [file.parent for file in (tmp_path / "run").rglob("run.json")]
    assert len(folders) == runs
    rules = gradsurgeon.load(tmp_path / "rules.yaml")
    acting: Counter[str] = Counter()
    for folder in folders:
        norms = run_norms.read(folder)
        inside = [str(other) for other in folders if folder in other.parents]
        assert len(norms.manifest.notes) == len(inside)
        assert all(map(str.endswith, norms.manifest.notes, inside))
        told_of = on_run.tried(MatchedRules(rules, Matcher(norms.manifest)), norms)
        with gradsurgeon.open_run(folder) as recorded:
            live = recorded.status()
            events = recorded.events
        kinds = ("trap", "spike")
        trips = Counter(event.rule for event in events if event.kind in kinds and not event.rank)
        for rule, told in told_of.items():
            assert not told.missing
            acting[rule] += told.acts
            each_rank = max(1, ranks)
            if rule in ("trap", "spikes"):
                assert told.acts == trips[rule]
                assert told.steps * each_rank == live[rule].fired
                assert told.acts * each_rank == live[rule].altered
            else:
                assert sum(told.by_name.values()) * each_rank == live[rule].altered
    assert {rule for rule in told_of if not acting[rule]} == silent
