"""Run directories for tests: written in this process or in another one that can be killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import environment
from ranks import Json

from gradsurgeon.records.store import Key, Part, Records, database
from gradsurgeon.records.store.layout import pack_absent
from gradsurgeon.records.store.memory import RecordedRow
from gradsurgeon.records.store.writer import RunWriter

KEY = Key("norms", "l2", "accumulated", ("a.weight", "a.bias"))


def shown(records: Records) -> Json:
    """Return what a `Report` takes of the records of a session."""
    return {"series": [Part(one, {}) for one in records], "dropped": records.dropped}


def values(*numbers: float) -> bytes:
    return array("f", numbers).tobytes()


def add(
    store: Records | RunWriter,
    key: Key,
    step: int,
    numbers: bytes,
    absent: Collection[int] = (),
    *,
    replace: bool = False,
) -> None:
    """Append a row of float32, one value per name of the key, or replace the last row of the same step."""
    bits = pack_absent(absent, len(key.names))
    store.add_row(RecordedRow(key, step, numbers, bits, replace))


def listing(path: Path) -> list[str]:
    """Return the names of what lies in a directory."""
    return sorted(entry.name for entry in path.iterdir())


# Which start of ranks a run belongs to.
JOB = {"host": "here", "parent": "7", "launch": "here/29500/none", "attempt": "0"}


def meta(names: Sequence[str] = KEY.names, **more: Any) -> Json:
    """Return what `run.json` says of a run with one rule on some parameters."""
    return {
        "gradsurgeon": "0.1.0",
        "created": "2030-01-01T00:00:00+00:00",
        "mode": "act",
        "start_step": 0,
        "rules": {"file": "rules.yaml", "text": "version: 1", "sha256": "0"},
        "model": {
            "origin": "Net",
            "params": [{"name": name, "aliases": [f"tied.{name}"]} for name in names],
        },
        "plan": {"rules": [{"id": "norms", "action": "norm-log", "params": list(names)}]},
        "roles": {"norms": {"role": "observe", "stats": ["l2"]}},
        **more,
    }


def write(
    path: Path,
    histories: Mapping[str, Sequence[float | None]],
    *,
    rank: int = 0,
    rule: str = "norms",
    point: str = "accumulated",
    stat: str = "l2",
) -> RunWriter:
    """Write one series with one column per name and one row per step; return the open writer."""
    writer = RunWriter(path, rank=rank, meta=meta(tuple(histories)))
    key = Key(rule, stat, point, tuple(histories))
    for step, row in enumerate(zip(*histories.values(), strict=True)):
        absent = frozenset(i for i, value in enumerate(row) if value is None)
        add(writer, key, step, values(*(value or 0.0 for value in row)), absent)
    return writer


def refuse_wal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write without shared memory between processes: as some file systems do, that refuses WAL."""
    connect = database.connect

    def without_memory(path: Path, patience: float, options: str = "") -> Any:
        of_records = path.suffix == ".db" and not options
        return connect(path, patience, "?vfs=unix-none" if of_records else options)

    monkeypatch.setattr(database, "connect", without_memory)


@contextlib.contextmanager
def another_process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python code in a process of its own; wait until it prints `ready`."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", line
        yield process
    finally:
        process.kill()
        process.communicate()
