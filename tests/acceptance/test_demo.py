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

RULES = """\
version: 1
rules:
  - id: norms
    action: norm-log
    params: "*"
"""
TRAP = """\
  - id: nans
    action: nan-trap
    params: "{params}"
    then: {then}
"""


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
    found = re.fullmatch(r"done: test accuracy ([\d.]+) %, 0 warnings", last)
    assert found is not None, last
    assert 95.0 <= float(found[1]) <= 100.0
    assert "FAILED" not in quickstart.stdout


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
    assert border.groups() == (demo.LAST_FINITE, demo.FIRST_NONFINITE)
    # Both linear layers are behind the fault, both convolutions before it.
    told = out[head.start() :].split("the border")[0]
    bad = re.findall(r"^ +> NaN +(\S+) ", told, re.MULTILINE)
    assert sorted(bad) == ["conv1.bias", "conv1.weight", "conv2.bias", "conv2.weight"]


def test_it_ends_in_the_diagnosis(quickstart: subprocess.CompletedProcess[str]) -> None:
    first, *_ = quickstart.stdout.splitlines()
    assert f"breaks it at step {demo.FAULT_STEP}: a square root of negative numbers" in first
    end = quickstart.stdout.partition("The trap found the cause:\n")[2]
    head, at, *_ = end.splitlines()
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
    expected = f"step {demo.FAULT_STEP}: no weight or moment moved: checked 32 tensors"
    assert expected in quickstart.stdout
    assert "the next step: 32 of 32 tensors moved" in quickstart.stdout


def test_the_output_tells_the_story_in_order(quickstart: subprocess.CompletedProcess[str]) -> None:
    out = quickstart.stdout
    marks = ["plan: ", "no weight or moment moved", "summary: ", "norms (l2)", "rules (4)"]
    places = [
        out.index(mark) for mark in [*marks, "events (2)", "The trap found the cause", "done: "]
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


@pytest.mark.cover_children
def test_the_demo_fails_without_a_trap(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES, encoding="utf-8")
    found = run("--epochs", "4", "--rules", str(rules))
    assert found.returncode == 1, found.stdout + found.stderr
    assert f"on {demo.FIRST_NONFINITE} at step {demo.FAULT_STEP}: none tripped" in found.stdout
    # Weights and moments of the convolutions become NaN; with decay, everything else moves as well.
    assert "FAILED: 32 weights or moments moved at step 100" in found.stdout
    assert re.search(r"FAILED: test accuracy [\d.]+ % is below 95 %", found.stdout)
    assert found.stdout.strip().splitlines()[-1].startswith("failed: ")


def test_the_demo_fails_with_a_trap_that_looks_elsewhere(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES + TRAP.format(params="fc*", then="skip-step"), encoding="utf-8")
    found = run("--epochs", "4", "--rules", str(rules))
    assert found.returncode == 1, found.stdout + found.stderr
    # By then, the NaN has reached the weights of the convolutions, and through them everything.
    assert re.search(
        rf"FAILED: expected one trap.*: fc\d\.\w+ at step {demo.FAULT_STEP + 1}", found.stdout
    )


def test_a_trap_that_raises_stops_the_demo_with_its_report(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES + TRAP.format(params="*", then="raise"), encoding="utf-8")
    found = run("--epochs", "4", "--rules", str(rules))
    assert found.returncode == 1, found.stdout + found.stderr
    assert f"FAILED: a trap stopped the training: step {demo.FAULT_STEP}, rule nans" in found.stdout
    assert "Traceback" not in found.stderr


def test_rules_that_do_not_fit_are_an_error_of_their_own(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES.replace('"*"', '"conv9.*"'), encoding="utf-8")
    found = run("--rules", str(rules))
    assert found.returncode == 2
    assert "conv9.*" in found.stderr
    assert "Traceback" not in found.stderr


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
