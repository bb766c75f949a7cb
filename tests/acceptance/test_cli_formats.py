"""`gradsurgeon lint` in pull requests: forms of output, where it goes, what fails a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import TIMEOUT
from commands import call, environment, write_rules

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_rules(tmp_path)
    return tmp_path


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
