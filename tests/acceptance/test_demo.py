from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import TIMEOUT

import gradsurgeon
from gradsurgeon import demo, packs

pytestmark = pytest.mark.slow

ROOT = Path(demo.__file__).resolve().parent.parent

LAST_FINITE, FIRST_NONFINITE = "fc1.weight", "conv2.weight"


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "gradsurgeon.demo", *args],
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **env},
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT,
        check=False,
    )


@pytest.fixture(scope="module")
def quickstart() -> subprocess.CompletedProcess[str]:
    return run()


def test_the_demo_succeeds(quickstart: subprocess.CompletedProcess[str]) -> None:
    assert quickstart.returncode == 0, quickstart.stdout + quickstart.stderr
    last = quickstart.stdout.strip().splitlines()[-1]
    found = re.fullmatch(r"done: test accuracy ([\d.]+) %", last)
    assert found is not None, last
    assert 95.0 <= float(found[1]) <= 100.0
    assert "Warning" not in quickstart.stderr


def test_the_trap_names_step_rule_and_border(quickstart: subprocess.CompletedProcess[str]) -> None:
    out = quickstart.stdout
    head = re.search(
        r"^ +step (\d+), rule (\S+): (\d+) of (\d+) gradients are not finite", out, re.MULTILINE
    )
    border = re.search(r"border lies between (\S+) \(still finite\) and (\S+) \(first", out)
    assert head is not None
    assert border is not None
    assert (int(head[1]), head[2]) == (demo.FAULT_STEP, "trap")
    assert (int(head[3]), int(head[4])) == (4, 8)
    assert border.groups() == (LAST_FINITE, FIRST_NONFINITE)
    # Both linear layers are behind the fault, both convolutions before it.
    told = out[head.start() :].split("the border")[0]
    bad = re.findall(r"^ +> NaN +(\S+) ", told, re.MULTILINE)
    assert sorted(bad) == ["conv1.bias", "conv1.weight", "conv2.bias", "conv2.weight"]


def test_it_ends_in_the_diagnosis(quickstart: subprocess.CompletedProcess[str]) -> None:
    first, *_ = quickstart.stdout.splitlines()
    assert f"breaks it at step {demo.FAULT_STEP}: a square root of negative numbers" in first
    said = quickstart.stdout + quickstart.stderr
    (head,) = (line.strip() for line in said.splitlines() if "diagnosis (" in line)
    end = quickstart.stdout.partition("diagnosis (")[2]
    at = end.splitlines()[1].removeprefix("      ")
    assert head == (
        "diagnosis (reproduced): NaN born in the forward pass of the root (DigitsNet): aten.sqrt"
    )
    assert at.startswith(f"  at {demo.__file__}:")
    assert at.endswith(", in forward: hidden = torch.where(hidden > 0, hidden.sqrt(), hidden)")
    assert "  cause: mathematics\n" in end
    assert len(end.splitlines()) < 35


def test_nothing_moved_at_the_fault_and_everything_after(
    quickstart: subprocess.CompletedProcess[str],
) -> None:
    # 8 parameters, each with exp_avg, exp_avg_sq and step.
    expected = "the trap skipped the update, and no weight or moment moved: checked 32 tensors"
    assert expected in quickstart.stdout
    assert "the next step: 32 of 32 tensors moved" in quickstart.stdout


def test_the_output_tells_the_story_in_order(quickstart: subprocess.CompletedProcess[str]) -> None:
    out = quickstart.stdout
    marks = ["plan: ", "no weight or moment moved", "summary: ", "norms (l2)", "rules (4)"]
    places = [
        out.index(mark) for mark in [*marks, "events (2)", "diagnosis (reproduced)", "done: "]
    ]
    assert places == sorted(places)
    assert "to know" not in out
    assert "NEVER FIRED" not in out
    assert "changed nothing" not in out
    epochs = [line for line in quickstart.stderr.splitlines() if line.startswith("epoch")]
    assert len(epochs) == demo.EPOCHS
    assert "\r" not in quickstart.stderr


def test_the_edits_of_the_quickstart_act(quickstart: subprocess.CompletedProcess[str]) -> None:
    cells = [line.split() for line in quickstart.stdout.split("rules (4)")[1].splitlines()]
    rows = {one[0]: one for one in cells if one}
    assert rows["gentle-start"][1:6] == ["scale", "2", "80", "100%", "39"]
    assert 5.0 < float(rows["bounded-head"][4].rstrip("%")) < 95.0
    assert rows["trap"][-4:] == ["step,", "last", "at", "100"]
    assert "looked 430 times, tripped in 1 step, last at 100" in quickstart.stdout


def test_a_stream_without_blocks_gets_escapes() -> None:
    found = run("--epochs", "6", PYTHONIOENCODING="ascii")
    assert found.returncode == 0, found.stdout + found.stderr
    assert r"\u2588" in found.stdout


def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert demo.main([]) == 2
    assert "pip install 'gradsurgeon[demo]'" in capsys.readouterr().err


def test_the_quickstart_fits_any_model() -> None:
    from torch import nn

    plan = gradsurgeon.plan(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), demo.default_rules())
    assert {binding.rule for binding in plan.bindings} == {"norms", "trap"}


def test_the_quickstart_of_an_installed_package_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "__file__", str(tmp_path / "gradsurgeon" / "packs.py"))
    assert demo.default_rules() == tmp_path / "rules" / "quickstart.yaml"
    inside = tmp_path / "gradsurgeon" / "rules" / "quickstart.yaml"
    inside.parent.mkdir(parents=True)
    inside.touch()
    assert demo.default_rules() == inside
