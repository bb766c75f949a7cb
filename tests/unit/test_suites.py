"""What is run by default shows something of everything; what is slow is left out, and run in CI."""

from __future__ import annotations

from pathlib import Path

import setups
from matrix import CASES, scripts

ROOT = Path(__file__).parents[2]


def test_every_cell_of_the_table_of_set_ups_is_backed_by_a_quick_test() -> None:
    cells = setups.collected()
    claims = {(cell.setup, cell.point, cell.differs, cell.refused) for cell in cells}
    quick = {
        (cell.setup, cell.point, cell.differs, cell.refused) for cell in cells if not cell.slow
    }
    assert claims - quick == set()


def test_eight_scripts_run_by_default_and_one_of_them_is_launched() -> None:
    names = [one for one in scripts(CASES) if isinstance(one, str)]
    assert [CASES[name].process for name in names] == [True] + [False] * 7


def test_ci_runs_the_command_of_the_readme_and_then_the_rest() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    quick, measured, rest = (line for line in ci if line.startswith("python -m pytest"))
    assert " && python -m pytest -n auto\n" in readme
    assert quick.startswith("python -m pytest -n auto --cov")
    assert " -m " not in quick.removeprefix("python -m")
    # `hypothesis` marks property tests: by default they get a tenth of their examples.
    asked = 'python -m pytest -n "$workers" -m "slow or hypothesis" '
    assert measured.startswith(f"{asked}$measured --cov --cov-append --cov-fail-under=95")
    assert rest.startswith(f"{asked}$ignored")
    assert "ignored=$(printf -- '--ignore=%s ' $measured)" in ci
    # The rest waits for processes most of the time, and takes one worker more than there are cores.
    assert "workers=$(($(nproc) + 1))" in ci
