"""What the README shows is what a newcomer gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import forked

import gradsurgeon
from gradsurgeon.actions import ACTIONS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_rule_file_is_clean(text: str, tmp_path: Path) -> None:
    assert gradsurgeon.load(text).rules
    (tmp_path / "rules.yaml").write_text(text, encoding="utf-8")
    lint = forked("-m", "gradsurgeon", "lint", "rules.yaml", cwd=tmp_path)
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "1 file clean\n")


@pytest.fixture
def newcomer(tmp_path: Path) -> Path:
    (tmp_path / "rules.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    (tmp_path / "train.py").write_text(blocks("python")[0], encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_the_quickstart_does_what_its_comments_say(newcomer: Path) -> None:
    done = forked("train.py", cwd=newcomer)
    assert (done.returncode, done.stderr) == (0, "")
    kept, latest, history, status = done.stdout.splitlines()[-4:]
    assert "4 rules, 4 parameters, 161 elements" in done.stdout
    assert kept == "True"
    assert float(latest) > 0
    assert history.startswith("[(0, ")
    assert "matched=2, fired=200" in status


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


@pytest.mark.slow
def test_a_pattern_that_matches_nothing(newcomer: Path) -> None:
    rules = newcomer / "rules.yaml"
    rules.write_text(rules.read_text().replace("fc*.bias", "fc3.*", 1), encoding="utf-8")
    done = forked("train.py", cwd=newcomer)
    assert done.returncode == 1
    assert (
        'rules.yaml:5:13: rule keep-bias: no parameter of the model matches "fc3.*"' in done.stderr
    )


@pytest.mark.slow
def test_the_launcher_prints_the_header_that_is_shown(newcomer: Path) -> None:
    # The same training, without a word about rules.
    lines, inside = [], False
    for line in (newcomer / "train.py").read_text(encoding="utf-8").splitlines():
        inside = line.startswith("with ") or (inside and line.startswith("    "))
        if "gradsurgeon" not in line and "session" not in line:
            lines.append(line[4:] if inside else line)
    script = "\n".join(lines)
    (newcomer / "plain.py").write_text(script, encoding="utf-8")
    done = forked("-m", "gradsurgeon", "run", "--rules", "rules.yaml", "plain.py", cwd=newcomer)
    assert done.returncode == 0, done.stderr
    shown = next(block for block in blocks("") if "updated by SGD" in block)
    assert shown.replace("/home/me", str(newcomer)) in done.stderr


def test_every_action_is_in_the_table() -> None:
    rows = re.findall(r"^\| `([a-z][a-z-]*)` \|", README, re.MULTILINE)
    assert sorted(rows) == sorted(ACTIONS)


@pytest.mark.slow
def test_every_option_of_run_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)[^`]*` \|", README, re.MULTILINE)
    shown = forked("-m", "gradsurgeon", "run", "--help", cwd=ROOT).stdout
    options = re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE)
    # The commands above the table show how a rule file is given.
    assert sorted(rows) == sorted({*options} - {"--rules"})


def test_it_is_read_to_the_end() -> None:
    assert len(README.splitlines()) <= 200


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "rules").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
            linked = page.parent / target if target else page
            assert linked.exists(), (page, target)
            if anchor:
                assert anchor in anchors(linked), (page, target, anchor)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


def test_the_two_commands_are_what_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in (
        "pip install torch==2.13.0",
        'pip install -e ".[dev]"',
        "python -m pytest -n auto",
    ):
        assert command in README
        assert command.replace("install", "install --quiet") in ci or command in ci
