"""What the README shows is what a newcomer gets."""

from __future__ import annotations

import re
from pathlib import Path

import guide
import pytest
from commands import forked, quiet

from gradsurgeon.actions import ACTIONS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture
def newcomer(tmp_path: Path) -> Path:
    (tmp_path / "rules.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    (tmp_path / "train.py").write_text(blocks("python")[0], encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_the_script_does_what_its_comments_say(newcomer: Path) -> None:
    done = forked("train.py", cwd=newcomer)
    quiet(done)
    history, status = done.stdout.splitlines()
    assert history.startswith("[(0, ")
    assert "matched=4, fired=400" in status


@pytest.mark.slow
def test_a_broken_rule_reads_as_shown(newcomer: Path) -> None:
    rules = newcomer / "rules.yaml"
    rules.write_text(rules.read_text().replace("params", "parms", 1), encoding="utf-8")
    shown = next(block for block in blocks("") if "unknown key" in block)
    lint = forked("-m", "gradsurgeon", "lint", "rules.yaml", cwd=newcomer)
    assert lint.returncode == 1
    assert shown in lint.stdout
    script = forked("train.py", cwd=newcomer)
    assert script.returncode == 1
    assert "RuleFileError: 1 problem in the rules" in script.stderr
    assert shown in script.stderr


def test_every_action_is_in_the_table() -> None:
    table = guide.text("rules").partition("| action | effect")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    assert sorted(re.findall("`([a-z-]+)`", " ".join(cells))) == sorted(ACTIONS)


@pytest.mark.slow
def test_every_option_of_run_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)[^`]*` \|", guide.text("start"), re.MULTILINE)
    shown = forked("-m", "gradsurgeon", "run", "--help", cwd=ROOT).stdout
    options = re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE)
    # The commands above the table show how a rule file is given.
    assert sorted(rows) == sorted({*options} - {"--rules"})


@pytest.mark.slow
def test_the_first_command_ends_in_a_page(tmp_path: Path) -> None:
    (command,) = [block for block in guide.blocks(README, "") if " gradsurgeon run " in block]
    installed, *parts = command.strip().split(" && gradsurgeon ")
    assert installed.endswith('pip install -e ".[torch]"')
    (tmp_path / "rules").symlink_to(ROOT / "rules")
    for part in parts:
        done = forked("-m", "gradsurgeon", *part.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    page = (tmp_path / "first.html").read_text(encoding="utf-8")
    assert "NaN born in the forward pass of attention (Attention): aten._softmax" in page
    assert "norm of all 7 parameters" in page


def test_the_two_commands_are_what_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in (
        "pip install torch==2.13.0",
        'pip install -e ".[dev]"',
        "python -m pytest -n auto",
    ):
        assert command in README
        assert command.replace("install", "install --quiet") in ci or command in ci
