"""The stories of the guide: each comes out as it is told, and its page holds what the guide says."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import ROOT, forked
from ranks import Json

import gradsurgeon

pytestmark = pytest.mark.slow

STORIES = ROOT / "rules" / "stories"
GUIDE = ROOT / "rules" / "guide"


class Told(NamedTuple):
    """What a story has printed, and the runs of its page."""

    lines: list[str]
    runs: list[Json]

    def number(self, pattern: str) -> float:
        """Return the only number in what was printed that stands where the pattern has a group."""
        (found,) = re.findall(pattern, "\n".join(self.lines), re.MULTILINE)
        return float(found)


def _call(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked(str(STORIES / f"{name}.py"), *arguments, cwd=folder, TMPDIR=str(folder))


def _tell(name: str, folder: Path) -> Told:
    done = _call(name, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert 5 <= len(lines) <= 10
    assert lines[-1].startswith(f"{name}.html: 2 runs")
    page = (folder / f"{name}.html").read_text(encoding="utf-8")
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    return Told(lines, json.loads(data[1])["runs"])


def _total(run: Json) -> list[float]:
    (line,) = run["kinds"][0]["wholes"]
    return [float(value) for value in line["values"]]


def _loss(run: Json) -> list[float]:
    (line,) = run["losses"]
    return [float(value) for value in line["values"]]


def test_a_gradient_explodes_and_a_clip_mends_it(tmp_path: Path) -> None:
    told = _tell("exploding_lstm", tmp_path)
    without, with_clip = told.runs
    norms = _total(without)
    worst = norms.index(max(norms))
    assert told.number(r"at step (\d+) the norm is") == worst
    assert told.number(r"the norm is (\d+),") == pytest.approx(max(norms), abs=0.51)
    assert told.number(r"never above ([\d.]+),") == pytest.approx(max(_total(with_clip)), abs=0.006)
    losses, clipped = _loss(without), _loss(with_clip)
    assert told.number(r"rises to \d+ at step (\d+)") == losses.index(max(losses))
    assert told.number(r"the loss ends at ([\d.]+)$") == pytest.approx(clipped[-1], abs=0.006)
    # Bits that differ from one processor to the next decide which burst is the highest, and where it is.
    assert max(norms) > 300 * norms[0]
    # They decide as well whether the norms before the burst are so wild that none stands out from them.
    for said in without["callouts"]:
        if said.startswith("higher for a while: "):
            continue
        times = re.search(
            r"the norm of all .* at step (\d+), ([\d.e+]+)x the steps before it; most in (\S+?)(?:,|$)",
            said,
        )
        assert times is not None
        assert norms[int(times[1])] > 10 * norms[0]
        assert float(times[2]) >= 10
        assert times[3].startswith(("lstm.", "embed."))
    # A clip that only looks, and one that acts.
    assert [run["observed"] for run in told.runs] == [True, False]


def test_a_layer_dies_and_a_clip_keeps_it_alive(tmp_path: Path) -> None:
    told = _tell("dying_relu", tmp_path)
    without, with_clip = told.runs
    died = int(told.number(r"fc1 since step (\d+)"))
    said = [line for line in without["callouts"] if line.startswith("norm exactly 0")]
    # Bits that differ from one processor to the next decide whether later layers die with it or some steps after.
    since = rf"norm exactly 0 since step {died}( or later)?, and until the end: fc1\.weight, "
    assert re.match(since, said[0])
    assert any("relu3" in line for line in said)
    assert not any("exactly 0 since" in line for line in with_clip["callouts"])
    # What comes after the dead layer still learns what share of the digits is which.
    (record,) = tmp_path.glob("dying_relu-*")
    with gradsurgeon.open_run(record / "without-clip") as run:
        assert run.latest("fc3.weight", rule="norms") == 0
        assert run.latest("fc4.bias", rule="norms") > 0
    assert not any("fc4.bias" in line for line in said)
    # The loss was low before, and is that of guessing after.
    assert told.number(r"falls to ([\d.]+) at") == pytest.approx(min(_loss(without)), abs=0.006)
    assert _loss(without).index(min(_loss(without))) < died
    assert told.number(r"relu3 ([\d.]+)%") == 100
    assert told.number(r"(\d+)% of the test images are read rightly;") < 20
    assert told.number(r"(\d+)% of the test images are read rightly$") > 80


def test_a_mask_makes_a_nan_in_float16_and_training_goes_on(tmp_path: Path) -> None:
    told = _tell("masked_softmax_float16", tmp_path)
    infinity, lowest = told.runs
    (trap,) = [event for event in infinity["events"] if event["kind"] == "trap"]
    steps = [first for first, _, kind in infinity["marks"] if kind == "trap"]
    assert len(steps) == 8
    # One in each epoch.
    assert [step // 14 for step in steps] == list(range(8))
    assert str(steps) in told.lines[0]
    message = trap["message"]
    assert trap["repeated"] == f"x8, steps {steps[0]}..{steps[-1]}"
    assert (
        "diagnosis (reproduced): NaN born in the forward pass of attention (Attention)" in message
    )
    assert "aten._softmax\n" in message
    assert "in forward: weights = torch.softmax(" in message
    assert "  cause: mathematics\n" in message
    table = infinity["kinds"][0]["table"]
    assert table["rows"][0][table["head"].index("non-finite")] == "8"
    (said,) = (line for line in infinity["callouts"] if line.startswith("non-finite: "))
    assert f"first at step {steps[0]}: " in said
    assert lowest["events"] == []
    for run in told.runs:
        assert "NaN" not in run["losses"][0]["values"]
        assert _loss(run)[-1] < _loss(run)[0] - 1


def test_an_optimizer_misses_adapters_and_the_launcher_says_so(tmp_path: Path) -> None:
    script = STORIES / "lora_left_out.py"
    done = forked("-m", "gradsurgeon", "run", str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (GUIDE / "checks.md").read_text(encoding="utf-8")
    said = " ".join(re.findall(r"^> (.*)$", page, re.MULTILINE))
    assert f"gradsurgeon: {said}" in done.stderr.splitlines()
    assert (
        "checked: debug-updates, debug-loop, debug-structure, debug-ranks; found: 1 fault"
        in done.stderr
    )


def _plain(text: str) -> list[list[str]]:
    """Return the words of each line, with the numbers that stand alone masked: they differ between machines."""
    masked = re.sub(r"(?<![\w.])\d[\d.,]*(e-?\d+)?(?![\w.])", "#", text.strip())
    return [line.split() for line in masked.splitlines()]


def _in_a_fork(command: list[str], **_: Any) -> None:
    """Do in a fork what a process of `subprocess.run` would do."""
    done = forked(*command[1:], cwd=Path.cwd())
    assert done.returncode == 0, done.stderr


def test_a_refactoring_slips_and_compare_names_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(STORIES)
    monkeypatch.setattr(sys, "argv", ["refactoring_slip.py", "--record", str(tmp_path)])
    slip = importlib.import_module("refactoring_slip")
    # It starts `gradsurgeon run` five times.
    monkeypatch.setattr(slip.subprocess, "run", _in_a_fork)
    assert slip.main() == 0
    answer, _, told = capsys.readouterr().out.partition("\n\nin 50 steps ")
    page = (GUIDE / "compare.md").read_text(encoding="utf-8")
    part = page.partition("<!-- story: begin -->\n")[2].partition("<!-- story: end -->")[0]
    assert _plain(answer) == _plain(part.replace("```\n", ""))
    assert answer.startswith("They part at step 0, forward: input of blocks.1.attn.out.\n")
    assert "\nstep 0, forward: the input of blocks.1.attn agrees, " in answer
    (apart,) = re.findall(r"never further apart than ([\d.]+)", told)
    (bound,) = re.findall(r"the two losses are never ([\d.]+) apart", page.replace("\n", " "))
    assert float(apart) < float(bound)
