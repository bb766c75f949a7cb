"""Prints the table of set-ups and actions that the tests on real ranks fill in."""

from __future__ import annotations

from typing import Any, cast

import pytest
from ranks import FINAL_WEIGHTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [one for some in terminalreporter.stats.values() for one in some]
    table: dict[tuple[str, str], str] = {}
    for report in reports:
        if isinstance(report, pytest.TestReport) and report.when == "call":
            for setup, action, text in _told(report):
                table[setup, action] = text
    if not table:
        return
    terminalreporter.section("final weights by set-up and action")
    terminalreporter.write_line(
        "largest difference from one process / from the same set-up without rules"
    )
    for action in dict.fromkeys(action for _, action in table):
        terminalreporter.write_line(action)
        for setup in dict.fromkeys(setup for setup, _ in table):
            terminalreporter.write_line(f"  {setup:<44}{table.get((setup, action), 'not run')}")


def _told(report: pytest.TestReport) -> list[tuple[str, str, str]]:
    return [cast("Any", told) for name, told in report.user_properties if name == FINAL_WEIGHTS]
