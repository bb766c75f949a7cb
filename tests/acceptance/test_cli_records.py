"""`gradsurgeon report` and `gradsurgeon export`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call, environment
from runs import add, meta, values, write

from gradsurgeon.records.store import Key
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]


def test_a_run_that_is_still_being_written_is_read_and_left_alone(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", {"w": [1.0, 2.0]})
    writer.commit()
    assert (tmp_path / "run" / "rank-0.db-wal").stat().st_size
    done = call("report", "run", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(
        "fine: running\nsummary: rules.yaml on Net: steps 0..1, 0 events\n"
    )
    done = call("export", "run", "--format", "csv", "-o", "run/rank-0.db-wal", cwd=tmp_path)
    assert done.returncode == 2
    assert "rank-0.db-wal: is there already and is no export" in done.stderr
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert run.history("w") == [(0, 1.0), (1, 2.0)]


class TestExport:
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
            add(writer, key, step, values(*[1.0] * 500))
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
