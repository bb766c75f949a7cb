"""`gradsurgeon report` and `gradsurgeon export`."""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import WITHOUT_TORCH, call, environment, quiet, refused
from ranks import Json
from runs import listing, meta, values, write

from gradsurgeon import Event
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

EVIL = '=cmd|"/c calc"!A1,C:\\\n\x1b[2J\x7f\u202e'


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a folder with a run of two ranks, two statistics, and an event."""
    histories: dict[str, list[float | None]] = {
        "w": [0.1, float("nan"), 3.0],
        "b": [None, 5.0, 1e6],
    }
    writers = [write(tmp_path / "run", histories, rank=rank) for rank in (0, 1)]
    for writer in writers:
        writer.add(Key("norms", "max", "accumulated", ("w",)), 2, values(float("-inf")))
        writer.event(Event("trap", "norms", 2, writer.rank, "w", "bad\nvery"))
    for writer in writers:
        writer.close()
    return tmp_path


def lines(text: str) -> list[Json]:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


class TestReport:
    def test_it_says_what_happened(self, here: Path) -> None:
        done = call("report", "run", cwd=here, code=WITHOUT_TORCH)
        quiet(done)
        assert done.stdout.startswith(
            "look: bad (and 1 other fault)\nended, traps tripped in 1 step\n"
            "summary: rules.yaml on Net: steps 0..2, 1 event (1 trap); 2 ranks"
        )
        assert "non-finite: 1 parameter, first at step 1: w" in done.stdout
        assert "✗" in done.stdout

    def test_escapes_where_blocks_cannot_be_shown(self, here: Path) -> None:
        done = call("report", "run", cwd=here, env={"PYTHONIOENCODING": "ascii"})
        quiet(done)
        assert r"\u2717" in done.stdout

    @pytest.mark.parametrize("command", [("report",), ("export", "--format", "csv")])
    def test_no_run(self, here: Path, command: tuple[str, ...]) -> None:
        done = call(command[0], "nowhere", *command[1:], cwd=here)
        refused(done)
        assert done.stderr.startswith("gradsurgeon: nowhere: cannot be opened as a run: No such")
        (here / "run" / "rank-1.db").write_bytes(b"\x1b" * 1000)
        done = call(command[0], "run", *command[1:], cwd=here)
        # What lacks a rank would look whole.
        refused(done)
        assert "rank-1.db: cannot be read" in done.stderr

    def test_a_run_that_is_still_being_written(self, tmp_path: Path) -> None:
        writer = write(tmp_path / "run", {"w": [1.0, 2.0]})
        writer.commit()
        done = call("report", "run", cwd=tmp_path)
        assert done.returncode == 0
        assert done.stdout.startswith(
            "fine: running\nsummary: rules.yaml on Net: steps 0..1, 0 events\n"
        )
        writer.close()

    def test_runs_inside_are_named_and_links_out_are_not_followed(self, here: Path) -> None:
        write(here / "run" / "process-2" / "Net-2", {"w": [1.0]}).close()
        write(here / "run" / "broken", {"w": [1.0]}).close()
        (here / "run" / "broken" / "rank-0.db").write_bytes(b"\x1b" * 1000)
        write(here / "outside" / "secret", {"w": [1.0]}).close()
        (here / "run" / "out").symlink_to(here / "outside")
        (here / "run" / "root").symlink_to("/")
        done = call("report", "run", cwd=here)
        quiet(done)
        assert "\n2 runs inside run, of other models or processes:\n" in done.stdout
        assert "\n  gradsurgeon report run/broken\n" in done.stdout
        assert "\n  gradsurgeon report run/process-2/Net-2\n" in done.stdout
        assert "secret" not in done.stdout

    def test_many_folders_within_one_another(
        self, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.chdir(here / "run")
            for _ in range(1500):
                Path("a").mkdir()
                patch.chdir("a")
        done = call("report", "run", cwd=here)
        quiet(done)
        assert "non-finite: 1 parameter, first at step 1: w" in done.stdout
        subprocess.run(["rm", "-rf", str(here / "run" / "a")], check=True)  # pytest would recurse


class TestExport:
    def test_csv(self, here: Path) -> None:
        done = call("export", "run", "--format", "csv", cwd=here, code=WITHOUT_TORCH)
        quiet(done)
        rows = list(csv.DictReader(io.StringIO(done.stdout)))
        assert len(rows) == 12
        assert done.stdout.splitlines()[:4] == [
            "step,rank,rule,point,stat,name,value",
            "0,0,norms,accumulated,l2,w,0.100000001",
            "1,0,norms,accumulated,l2,w,nan",
            "1,0,norms,accumulated,l2,b,5",
        ]
        assert [row["value"] for row in rows if row["stat"] == "max"] == ["-inf", "-inf"]
        assert {row["rank"] for row in rows} == {"0", "1"}

    def test_jsonl_has_events_and_is_json_to_the_letter(self, here: Path) -> None:
        done = call("export", "run", "--format", "jsonl", cwd=here)
        found = lines(done.stdout)
        assert [one["type"] for one in found] == ["value"] * 12 + ["event"] * 2
        assert found[0] == {
            "type": "value",
            "step": 0,
            "rank": 0,
            "rule": "norms",
            "point": "accumulated",
            "stat": "l2",
            "name": "w",
            "value": 0.100000001,
        }
        assert found[1]["value"] == "NaN"
        assert found[5]["value"] == "-Infinity"
        assert found[-1] == {
            "type": "event",
            "step": 2,
            "rank": 1,
            "rule": "norms",
            "kind": "trap",
            "name": "w",
            "message": "bad\nvery",
            "diagnosis": None,
            "sample_ids": [],
        }

    def test_events_go_by_rule_and_name(self, here: Path) -> None:
        done = call("export", "run", "--format", "jsonl", "--name", "b", cwd=here)
        assert {one["type"] for one in lines(done.stdout)} == {"value"}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--stat", "l3"), "; recorded: norms l2, norms max"),
            (("--rule", "x"), "nothing recorded fits"),
            (("--name", "x*"), "nothing recorded fits"),
            (("--name", "re:("), "gradsurgeon: "),
            (("-o", "no/such/file"), "cannot write no/such/file: No such file or directory"),
            (("-o", "run"), "cannot write run: Is a directory"),
            (("-o", "run/rank-0.db"), "run/rank-0.db: is there already and is no export"),
            (("-o", "run/run.json"), "run/run.json: is there already and is no export"),
            (("-o", "link.csv"), "link.csv: is there already and is no export"),
            (("-o", "train.py"), "train.py: is there already and is no export; name another one"),
            (("-o", "/dev/full"), "cannot write /dev/full: No space left on device"),
        ],
    )
    def test_what_cannot_be_done(self, here: Path, options: tuple[str, ...], message: str) -> None:
        (here / "train.py").write_text("print('hours of work')\n")
        (here / "link.csv").symlink_to("run/rank-1.db")
        before = listing(here / "run")
        done = call("export", "run", "--format", "csv", *options, cwd=here)
        refused(done)
        assert message in done.stderr
        assert "internal error" not in done.stderr
        assert listing(here / "run") == before
        assert (here / "train.py").read_text() == "print('hours of work')\n"
        with open_run(here / "run") as run:
            assert run.latest("b") == 1e6

    def test_the_log_of_a_run_that_is_being_written_is_left_alone(self, tmp_path: Path) -> None:
        writer = write(tmp_path / "run", {"w": [1.0, 2.0]})
        writer.commit()
        assert (tmp_path / "run" / "rank-0.db-wal").stat().st_size
        done = call("export", "run", "--format", "csv", "-o", "run/rank-0.db-wal", cwd=tmp_path)
        assert done.returncode == 2
        assert "rank-0.db-wal: is there already and is no export" in done.stderr
        writer.close()
        with open_run(tmp_path / "run") as run:
            assert run.history("w") == [(0, 1.0), (1, 2.0)]

    @pytest.mark.parametrize("format_", ["csv", "jsonl"])
    def test_an_export_is_replaced_as_a_whole(self, here: Path, format_: str) -> None:
        out = here / "out"
        for stat in ("l2", "max"):
            done = call("export", "run", "--format", format_, "-o", "out", "--stat", stat, cwd=here)
            quiet(done)
            assert f"{stat}" in out.read_text()
        assert "l2" not in out.read_text()
        out.chmod(0o640)
        (here / "run" / "rank-1.db").write_bytes(b"\x1b" * 1000)
        before = out.read_bytes()
        assert call("export", "run", "--format", format_, "-o", "out", cwd=here).returncode == 2
        assert (out.read_bytes(), out.stat().st_mode & 0o777) == (before, 0o640)
        assert listing(here) == ["out", "run"]

    @pytest.mark.parametrize("name", [EVIL, "'w", "@w", "a\\n", "grö\u202eße", "plain.weight"])
    def test_a_name_can_be_had_back_from_csv(self, tmp_path: Path, name: str) -> None:
        writer = RunWriter(tmp_path / "run", meta=meta((name,)))
        writer.add(Key("norms", "l2", "step", (name,)), 0, values(-1.5))
        writer.close()
        text, plain = (
            call("export", "run", "--format", form, cwd=tmp_path).stdout
            for form in ("csv", "jsonl")
        )
        assert not {"\x1b", "\x7f", "\u202e"} & set(text + plain)
        assert lines(plain)[0]["name"] == name
        (row,) = csv.DictReader(io.StringIO(text, newline=""))
        # No table takes it for a formula.
        assert row["name"][0] not in "=@"
        assert row["value"] == "-1.5"
        found = re.sub(
            r"\\(\\|n|x..|u....)",
            lambda escape: ast.literal_eval(f'"{escape[0]}"'),
            row["name"].removeprefix("'"),
        )
        assert found == name

    def test_nothing_recorded_at_all(self, tmp_path: Path) -> None:
        RunWriter(tmp_path / "run", meta=meta()).close()
        done = call("export", "run", "--format", "csv", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (2, "gradsurgeon: run: nothing was recorded\n")

    def test_a_reader_that_stops_reading(self, tmp_path: Path) -> None:
        write(tmp_path / "run", {"w": [1.0] * 20_000}).close()
        process = subprocess.Popen(
            [sys.executable, "-m", "gradsurgeon", "export", "run", "--format", "csv"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"step,")
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait() == 141

    def test_the_memory_does_not_grow_with_the_run(self, tmp_path: Path) -> None:
        writer = RunWriter(tmp_path / "run", meta=meta(("w",)))
        key = Key("norms", "l2", "step", tuple(f"p{i}" for i in range(500)))
        for step in range(40_000):  # 80 MB
            writer.add(key, step, values(*[1.0] * 500))
        writer.close()
        # Not `ru_maxrss`, which a process has from the one that started it.
        code = (
            "import re, sys\nfrom gradsurgeon.cli import main\nmain(sys.argv[1:])\n"
            "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())\n"
            "print(int(peak[1]) // 1024, file=sys.stderr)"
        )
        name = ("--name", "p7", "-o", os.devnull)
        done = call("export", "run", "--format", "csv", *name, cwd=tmp_path, code=code)
        assert 0 < int(done.stderr) < 60
