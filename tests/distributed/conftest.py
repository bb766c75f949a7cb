"""Prints the table of set-ups and actions that the tests on real ranks fill in."""

from __future__ import annotations

import pytest

Table = dict[tuple[str, str], str]
_TABLE = pytest.StashKey[Table]()


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> Table:
    return pytestconfig.stash.setdefault(_TABLE, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    table = config.stash.get(_TABLE, {})
    if not table:
        return
    rows = list(dict.fromkeys(setup for setup, _ in table))
    columns = list(dict.fromkeys(action for _, action in table))
    terminalreporter.section("final weights by set-up and action")
    terminalreporter.write_line(
        "largest difference from one process / from the same set-up without rules"
    )
    for action in columns:
        terminalreporter.write_line(action)
        for setup in rows:
            terminalreporter.write_line(f"  {setup:<44}{table.get((setup, action), 'not run')}")
