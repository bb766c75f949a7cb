"""The story of two tasks: its rules are those of the guide, and it says what the guide says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradsurgeon

RULES = Path(__file__).parents[2] / "rules"
SCRIPT = RULES / "stories" / "two_tasks.py"
GUIDE = (RULES / "guide" / "two-tasks.md").read_text(encoding="utf-8")


def test_the_rules_of_the_guide_are_those_of_the_script() -> None:
    shown = [
        gradsurgeon.load(text).rules
        for text in re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    ]
    assert [rule for rules in shown for rule in rules] == list(
        gradsurgeon.load(SCRIPT.with_suffix(".yaml")).rules
    )


@pytest.mark.slow
def test_the_script_says_what_the_guide_says() -> None:
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.findall(r'mode="(\w+)": ([\d.]+)% of the digits, ([\d.]+)% of the ink', done.stdout)
    (observed, *looked), (acted, *surgery) = found
    assert (observed, acted) == ("observe", "act")
    assert float(looked[0]) < 50
    assert float(surgery[0]) > 85
    assert min(float(looked[1]), float(surgery[1])) > 90
    (smaller, _) = re.findall(r"digit (\d+) times smaller", done.stdout)
    assert int(smaller) > 10
