"""`gradsurgeon lint` in pull requests: forms of output, where it goes, what fails a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import TIMEOUT
from commands import WITHOUT_TORCH, call, environment, write_rules

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

MACHINE = {"json": "problems", "sarif": "runs"}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_rules(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "fail_on", "code"),
    [
        ("clean.yaml", "warning", 0),
        ("warned.yaml", "error", 0),
        ("warned.yaml", "warning", 1),
        ("wrong.yaml", "error", 1),
        ("wrong.yaml", "warning", 1),
        ("wrong.yaml", "never", 0),
        ("missing.yaml", "never", 2),
    ],
)
def test_what_fails_is_chosen(here: Path, file: str, fail_on: str, code: int) -> None:
    assert call("lint", file, "--fail-on", fail_on, cwd=here).returncode == code


@pytest.mark.parametrize("form", MACHINE)
def test_forms_for_programs_stand_alone_on_stdout(here: Path, form: str) -> None:
    done = call("lint", "wrong.yaml", "clean.yaml", "--format", form, cwd=here, code=WITHOUT_TORCH)
    assert (done.returncode, done.stderr) == (1, "")
    assert MACHINE[form] in json.loads(done.stdout)


def test_annotations_stand_on_stdout_and_the_summary_elsewhere(here: Path) -> None:
    done = call("lint", "wrong.yaml", "warned.yaml", "--format", "github", cwd=here)
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == [
        "::error file=wrong.yaml",
        "::warning file=warned.yaml",
    ]
    assert done.stderr == "2 files: 1 error, 1 warning\n"


def test_annotations_start_at_the_checkout_where_a_job_runs_inside_it(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "wrong.yaml").write_bytes((here / "wrong.yaml").read_bytes())
    env = {"GITHUB_WORKSPACE": str(here)}
    done = call("lint", "wrong.yaml", "--format", "github", cwd=here / "sub", env=env)
    assert done.stdout.startswith("::error file=sub/wrong.yaml,line=3,")
    env = {"GITHUB_WORKSPACE": "/elsewhere"}
    done = call("lint", "wrong.yaml", "--format", "github", cwd=here / "sub", env=env)
    assert done.stdout.startswith("::error file=wrong.yaml,line=3,")


@pytest.mark.parametrize("form", ["full", "concise", "json", "github", "sarif"])
def test_a_file_gets_what_stdout_would(here: Path, form: str) -> None:
    printed = call("lint", "wrong.yaml", "--format", form, cwd=here)
    done = call("lint", "wrong.yaml", "--format", form, "--output", "out.txt", cwd=here)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "wrong.yaml: 1 error\n")
    assert (here / "out.txt").read_text(encoding="utf-8") == printed.stdout != ""


def test_a_file_that_cannot_be_written_says_so(here: Path) -> None:
    done = call("lint", "clean.yaml", "--output", "no/such/out.txt", cwd=here)
    assert done.returncode == 2
    assert done.stderr == "gradsurgeon: cannot write no/such/out.txt: No such file or directory\n"


def on_a_terminal(here: Path, **env: str) -> str:
    pty = pytest.importorskip("pty", reason="no terminals to be had on this system")
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "gradsurgeon", "lint", "wrong.yaml", "--format", "concise"],
        cwd=here,
        env={**environment(), "TERM": "xterm", **env},
        stdout=follower,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.wait(timeout=TIMEOUT) == 1
    os.close(follower)
    text = os.read(leader, 1 << 16).decode()
    os.close(leader)
    return text


def test_a_terminal_gets_colours_unless_they_are_unwanted(here: Path) -> None:
    assert "\033[1;31merror:\033[0m" in on_a_terminal(here, NO_COLOR="")
    assert "\033" not in on_a_terminal(here, NO_COLOR="1")
    assert "\033" not in on_a_terminal(here, NO_COLOR="", TERM="dumb")
    assert "\033" not in call("lint", "wrong.yaml", cwd=here, env={"NO_COLOR": ""}).stdout
