"""The table of final weights is printed by whichever process prints, in one and in several."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CASE = """
import pytest
from ranks import FINAL_WEIGHTS

@pytest.mark.parametrize("action", ["scale", "clamp"])
@pytest.mark.parametrize("setup", ["one process", "DDP"])
def test_it(record_property, setup, action):
    if (setup, action) != ("DDP", "clamp"):
        record_property(FINAL_WEIGHTS, (setup, action, f"{setup} with {action}"))
"""
TABLE = """
largest difference from one process / from the same set-up without rules
clamp
  DDP                                         not run
  one process                                 one process with clamp
scale
  DDP                                         DDP with scale
  one process                                 one process with scale
"""


@pytest.mark.slow
def test_the_table_is_printed(tmp_path: Path) -> None:
    case = tmp_path / "tests" / "distributed" / "test_it.py"
    case.parent.mkdir(parents=True)
    case.write_text(CASE, encoding="utf-8")
    for name in ("conftest.py", "forks.py", "ranks.py", "bounds.py"):
        shutil.copy(TESTS / name, tmp_path / "tests")
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    (tmp_path / "pytest.toml").write_text('[pytest]\npythonpath = ["tests"]\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist=worksteal", "tests"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert TABLE in done.stdout
