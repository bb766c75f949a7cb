"""`gradsurgeon report --fail-on`, and what it prints for programs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from commands import WITHOUT_TORCH, call, call_here, quiet, refused
from ranks import Json
from runs import meta, values, write

from gradsurgeon import Diagnosis, Event, open_run
from gradsurgeon.common.diagnosis import TensorFacts
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.common.rows import Rows
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report import from_run

RULES = Path(__file__).parents[2] / "rules"
KINDS = (
    "trap, spike, check, skipped-step, scaler-skip, never-fired, hook-lost, hook-rearmed, notice"
)
EVIL = "w\n::error::x\x1b[2J,\u202e:%0A"


def fill(path: Path, *events: Event, ranks: int = 1) -> None:
    """Write a run of a spiky, a broken and a silent parameter, with the same events on each rank."""
    histories: dict[str, Sequence[float | None]] = {
        "w": [0.1] * 20 + [64.0] + [0.1] * 9,
        "b": [math.nan, *[None] * 9, 3.0, math.inf, *[2.0] * 18],
        "never": [None] * 30,
        "lost": [-math.inf] * 30,
    }
    writers = [write(path, histories, rank=rank) for rank in range(ranks)]
    for writer in writers:
        writer.statuses({"norms": RuleStatus(4, 120, 30, 29, ("watch out",))})
        for event in events:
            writer.event(Event(event.kind, event.rule, event.step, writer.rank, *_rest(event)))
    for writer in writers:
        writer.close()


def _rest(event: Event) -> tuple[str, str]:
    return event.name, event.message


def trap(step: int, name: str = "b", rule: str = "no-nan", message: str = "bad\nvery") -> Event:
    return Event("trap", rule, step, 0, name, message)


SKIP = Event("skipped-step", "", 11, 0, "", "the step was skipped")


class TestFailOn:
    @pytest.fixture
    def here(self, tmp_path: Path) -> Path:
        fill(tmp_path / "run", trap(11), SKIP, trap(0), trap(29, "w"))
        return tmp_path

    @pytest.mark.parametrize(
        ("kinds", "lines"),
        [
            ("trap", ["3 trap events, first at step 0, rule no-nan, b"]),
            ("skipped-step", ["1 skipped-step event, first at step 11"]),
            (
                " skipped-step, trap,trap",
                [
                    "1 skipped-step event, first at step 11",
                    "3 trap events, first at step 0, rule no-nan, b",
                ],
            ),
            ("never-fired,trap", ["3 trap events, first at step 0, rule no-nan, b"]),
            # What the table of norms calls a spike is no event.
            ("spike", []),
            ("never-fired,notice", []),
        ],
    )
    @pytest.mark.parametrize("form", ["text", "json"])
    def test_the_exit_code_and_a_line_for_each_kind(
        self, here: Path, kinds: str, lines: list[str], form: str
    ) -> None:
        plain = call_here("report", "run", "--format", form, cwd=here)
        quiet(plain)
        done = call_here("report", "run", "--format", form, "--fail-on", kinds, cwd=here)
        assert done.returncode == int(bool(lines))
        assert done.stderr.splitlines() == [f"gradsurgeon: {line}" for line in lines]
        assert done.stdout == plain.stdout

    @pytest.mark.parametrize(
        ("kinds", "message"),
        [
            ("trip", f"`trip` is no kind of event; did you mean `trap`? kinds: {KINDS}"),
            ("trap,never-fire", f"`never-fire` is no kind of event; did you mean `never-fired`? kinds: {KINDS}"),
            ("", f"`` is no kind of event; kinds: {KINDS}"),
            ("\x1b[2J", rf"`\x1b[2J` is no kind of event; kinds: {KINDS}"),
        ],
    )  # fmt: skip
    def test_an_unknown_kind(self, here: Path, kinds: str, message: str) -> None:
        done = call_here("report", "run", "--fail-on", kinds, cwd=here)
        refused(done)
        assert done.stderr.endswith(f"error: argument --fail-on: {message}\n")

    def test_what_several_ranks_note_counts_once(self, tmp_path: Path) -> None:
        fill(tmp_path / "run", trap(3), trap(5), ranks=3)
        done = call_here("report", "run", "--fail-on", "trap", cwd=tmp_path)
        assert done.stderr == "gradsurgeon: 2 trap events, first at step 3, rule no-nan, b\n"

    def test_runs_inside_count_as_well(self, tmp_path: Path) -> None:
        fill(tmp_path / "run")
        fill(tmp_path / "run" / "process-2" / "Net", SKIP)
        fill(tmp_path / "run" / "Net-2", trap(7))
        done = call_here("report", "run", "--fail-on", "trap,skipped-step", cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.splitlines() == [
            "gradsurgeon: run/Net-2: 1 trap event, first at step 7, rule no-nan, b",
            "gradsurgeon: run/process-2/Net: 1 skipped-step event, first at step 11",
        ]
        # The folder above is no run itself.
        above = call_here("report", ".", "--fail-on", "trap", cwd=tmp_path)
        assert above.returncode == 1
        assert above.stderr == "gradsurgeon: run/Net-2: 1 trap event, first at step 7, rule no-nan, b\n"  # fmt: skip

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_no_run(self, tmp_path: Path, form: str) -> None:
        options = ("--format", form, "--fail-on", "trap")
        done = call_here("report", "nowhere", *options, cwd=tmp_path)
        refused(done)
        assert done.stderr.startswith("gradsurgeon: nowhere: cannot be opened as a run: No such")

    def test_a_run_inside_that_cannot_be_read_is_not_taken_for_clean(self, here: Path) -> None:
        fill(here / "run" / "broken", trap(7))
        (here / "run" / "broken" / "rank-0.db").write_bytes(b"\x1b" * 1000)
        done = call_here("report", "run", "--fail-on", "never-fired", cwd=here)
        assert done.returncode == 2
        assert "run/broken/rank-0.db: cannot be read" in done.stderr
        assert call_here("report", "run", cwd=here).returncode == 0
        # It hides nothing of the others, neither here nor on the page.
        done = call_here("report", "run", "--fail-on", "trap", "--html", "page.html", cwd=here)
        assert done.returncode == 2
        assert "gradsurgeon: 3 trap events, first at step 0, rule no-nan, b\n" in done.stderr
        done = call_here("report", ".", "--html", "page.html", cwd=here / "run")
        assert (done.returncode, done.stdout[:17]) == (2, "page.html: 1 run;")

    def test_a_page_of_a_folder_leaves_out_what_cannot_be_read(self, here: Path) -> None:
        fill(here / "other")
        (here / "other" / "rank-0.db").write_bytes(b"\x1b" * 1000)
        done = call_here("report", ".", "--html", "page.html", "--fail-on", "trap", cwd=here)
        assert (done.returncode, done.stdout[:17]) == (2, "page.html: 1 run;")
        broken, traps = done.stderr.splitlines()
        assert broken.startswith("gradsurgeon: other/rank-0.db: cannot be read")
        assert traps == "gradsurgeon: run: 3 trap events, first at step 0, rule no-nan, b"
        page = (here / "page.html").read_text(encoding="utf-8")
        assert '"problems":["other/rank-0.db: cannot be read' in page
        # Of none that can be read there is no page.
        alone = call_here("report", "other", "--html", "other.html", cwd=here)
        refused(alone)
        assert not (here / "other.html").exists()

    @pytest.mark.parametrize("name", ["", "-", ".", "pipe"])
    def test_a_page_needs_a_file(self, here: Path, name: str) -> None:
        os.mkfifo(here / "pipe")  # nobody reads it: opening it would wait for ever
        for command in ("report", "watch"):
            done = call_here(command, "run", "--html", name, cwd=here)
            refused(done)
            assert f"argument --html: `{name}` is no file that a browser" in done.stderr

    def test_texts_of_the_run_are_escaped(self, tmp_path: Path) -> None:
        fill(tmp_path / "run", trap(1, EVIL, EVIL, EVIL))
        done = call_here("report", "run", "--fail-on", "trap", cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert not {"\x1b", "\u202e"} & set(done.stdout + done.stderr)


class TestJSON:
    def read(self, folder: Path, *more: str) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        done = call_here("report", "run", "--format", "json", *more, cwd=folder)
        quiet(done)
        return json.loads(done.stdout, parse_constant=refuse)

    def test_one_object(self, tmp_path: Path) -> None:
        fill(tmp_path / "run", trap(11), SKIP)
        found = self.read(tmp_path)
        norms = found.pop("norms")
        (rank,) = found.pop("ranks")
        assert rank.pop("written") > 1e9
        assert rank == {"rank": 0, "step": 29, "behind": 0}
        nothing: Json = {"diagnosis": None, "sample_ids": []}
        assert found == {
            "version": 1,
            "title": "rules.yaml on Net",
            "band": {"state": "broken", "sentence": "bad"},
            "ended": {
                "state": "ended", "words": "ended, 1 step skipped", "ranks": {"0": "ended"},
            },
            "steps": [0, 29],
            "notes": [],
            "remarks": [
                "non-finite: 2 parameters, first at step 0: b, lost",
                "largest spike: w, 64 at step 20, 640x the steps before it",
                "never got a gradient: never",
            ],
            "params": ["w", "b", "never", "lost"],
            "rules": [
                {
                    "id": "norms",
                    "action": "norm-log",
                    "role": "observe",
                    "status": {
                        "matched": 4,
                        "fired": 120,
                        "altered": 30,
                        "changed": 0.25,
                        "last_step": 29,
                        "warnings": ["watch out"],
                    },
                }
            ],
            "events": [
                {"kind": "trap", "rule": "no-nan", "step": 11, "rank": 0, "name": "b", "message": "bad\nvery", **nothing},
                {"kind": "skipped-step", "rule": "", "step": 11, "rank": 0, "name": "", "message": "the step was skipped", **nothing},
            ],
            "losses": [],
            "rates": [],
            "median_of_one_step_in": 1,
            "inside": [],
        }  # fmt: skip
        source = {"kind": "gradient", "rule": "norms", "point": "accumulated"}
        assert norms == [
            {
                "name": "w", **source, "first": 0.100000001, "median": 0.100000001, "largest": 64.0,
                "spike": {"step": 20, "value": 64.0, "times": pytest.approx(640)},
                "last": 0.100000001, "nonfinite": 0, "nonfinite_step": None, "zero_since": None,
            },
            {
                "name": "b", **source, "first": "NaN", "median": 2.0, "largest": 3.0, "spike": None,
                "last": 2.0, "nonfinite": 2, "nonfinite_step": 0, "zero_since": None,
            },
            {
                "name": "lost", **source, "first": "-Infinity", "median": "NaN", "largest": "NaN",
                "spike": None, "last": "-Infinity", "nonfinite": 30, "nonfinite_step": 0, "zero_since": None,
            },
        ]  # fmt: skip

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

    def test_runs_inside(self, tmp_path: Path) -> None:
        fill(tmp_path / "run")
        fill(tmp_path / "run" / "Net-2")
        assert self.read(tmp_path)["inside"] == ["run/Net-2"]
        done = call_here("report", ".", "--format", "json", cwd=tmp_path)
        refused(done)
        assert done.stderr.startswith("gradsurgeon: .: cannot be opened as a run: ")
        assert done.stderr.endswith("; runs inside: run\n")

    def test_a_terminal_shows_it_as_it_is(self, tmp_path: Path) -> None:
        name = f"{EVIL}\x7f"
        writer = RunWriter(tmp_path / "run", meta=meta((name,)))
        writer.add(Key(EVIL, "l2", "step", (name,)), 0, values(1.0))
        writer.event(trap(0, name, EVIL, EVIL))
        writer.close()
        done = call_here("report", "run", "--format", "json", cwd=tmp_path)
        assert done.stdout.replace("\n", "").isascii()
        assert done.stdout.replace("\n", "").isprintable()
        found = json.loads(done.stdout)
        assert (found["params"], found["norms"][0]["name"]) == ([name], name)
        assert found["events"][0]["message"] == EVIL


@pytest.mark.slow
@pytest.mark.cover_children
def test_without_torch(tmp_path: Path) -> None:
    fill(tmp_path / "run", trap(11))
    for form in ("text", "json"):
        options = ("--format", form, "--fail-on", "trap")
        done = call("report", "run", *options, cwd=tmp_path, code=WITHOUT_TORCH)
        assert done.returncode == 1
        assert done.stderr == "gradsurgeon: 1 trap event, first at step 11, rule no-nan, b\n"
    assert KINDS in " ".join(call_here("report", "--help", cwd=tmp_path).stdout.split()).replace(
        "- ", "-"
    )


def test_the_guide_shows_what_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "runs" / "today", trap(11))
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
