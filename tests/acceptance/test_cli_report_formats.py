"""`gradsurgeon report --fail-on`, and what it prints for programs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from commands import call_here, quiet
from runs import meta, write

from gradsurgeon import Diagnosis, Event, open_run
from gradsurgeon.cli import main
from gradsurgeon.common.diagnosis import TensorFacts
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.common.rows import Rows
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report import from_run

RULES = Path(__file__).parents[2] / "rules"


class TestJSON:
    def read(self, folder: Path, *more: str) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        done = call_here("report", "run", "--format", "json", *more, cwd=folder)
        quiet(done)
        return json.loads(done.stdout, parse_constant=refuse)

    def test_before_the_first_step_and_while_it_is_written(self, tmp_path: Path) -> None:
        writer = RunWriter(tmp_path / "run", meta=meta())
        found = self.read(tmp_path, "--fail-on", "trap")
        assert found["ended"] == {"state": "running", "words": "running", "ranks": {"0": "running"}}
        assert (found["steps"], found["notes"], found["remarks"]) == (None, [], [])
        assert [(rule["id"], rule["status"]) for rule in found["rules"]] == [("norms", None)]
        assert found["norms"] == found["events"] == []
        writer.close()

    def test_the_numbers_are_those_of_the_text(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gradsurgeon.report.history.MOST_VALUES", 5_000)
        history = [1.0 + step % 7 / 8 for step in range(10_000)]
        history[5_000], history[9_000] = 1e4, math.nan
        write(tmp_path / "run", {"w": history}).close()
        found = self.read(tmp_path)
        (row,) = found["norms"]
        with open_run(tmp_path / "run") as run:
            text = from_run(run).text(width=120)
        assert f"{found['median_of_one_step_in']} successive steps count as one, " in text
        assert found["median_of_one_step_in"] > 1
        assert (row["largest"], row["last"]) == (1e4, history[-1])
        assert (row["nonfinite"], row["nonfinite_step"]) == (1, 9_000)
        assert row["spike"]["step"] == 5_000


def test_a_wrong_option_gives_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "run", "--format", "github"]) == 2
    assert "invalid choice: 'github'" in capsys.readouterr().err
    assert main(["report", "--help"]) == 0


def test_the_guide_shows_what_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = write(tmp_path / "runs" / "today", {"w": [0.1] * 20 + [64.0] + [0.1] * 9})
    writer.statuses({"norms": RuleStatus(1, 30, 0, 29)})
    writer.event(Event("trap", "no-nan", 11, 0, "w", "bad"))
    writer.close()
    page = (RULES / "guide" / "runs.md").read_text(encoding="utf-8")
    part = page.partition("\n## Watch a run\n")[0]
    commands = re.findall(r"^gradsurgeon (.*?) *#", part, re.MULTILINE)
    codes = [call_here(*command.split(), cwd=tmp_path).returncode for command in commands]
    assert codes == [0, 0, 1, 0, 0]
    code, _ = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec("import gradsurgeon\n" + code.replace("*.weight", "?"))
    assert re.search(r"^w +64\.0$", capsys.readouterr().out, re.MULTILINE)
    done = call_here("report", "runs/today", "--format", "json", cwd=tmp_path)
    found = json.loads(done.stdout)
    form = (
        (RULES / "reference.md").read_text(encoding="utf-8").partition("## The report as JSON")[2]
    )
    keys = [*found, *found["rules"][0], *found["norms"][0], *found["events"][0]]
    keys += ["step", "value", "times", *Diagnosis("not reproduced", (), 0, 0).to_json()]
    keys += [field.name for field in (*fields(Rows), *fields(TensorFacts))]
    for key in keys:
        assert f"`{key}`" in form, key
