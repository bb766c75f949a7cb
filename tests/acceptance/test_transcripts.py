"""Transcripts of the command line, see `transcripts.py`: a new case is a file of `cases/transcripts`.

Beside commands there are `without-torch`, which is gradsurgeon where torch cannot be imported, `on-2-ranks` before a
command, and `write-run`, see `write_run`. To write the output of cases anew, run this file as a script with their
names, and read what has changed.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from commands import WITHOUT_TORCH, call
from outside import Folder
from runs import add, values, write
from transcripts import in_a_shell, replayed, shown

from gradsurgeon import Event
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.records.store import Key

CASES = Path(__file__).parents[1] / "cases" / "transcripts"
TOOLS = {"gradsurgeon": ["-m", "gradsurgeon"], "python": []}


def run_command(line: str, path: Path) -> str:
    """Run a command; return its output in the form of a transcript."""
    words = shlex.split(line)
    env = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    ranks = 0
    if words[0] == "on-2-ranks":
        ranks = 2
        words.pop(0)
    if words[0] == "without-torch":
        done = call(*words[1:], cwd=path, code=WITHOUT_TORCH)
        return shown(done.returncode, done.stdout, done.stderr)
    if words[0] == "write-run":
        write_run(path, path / words[1])
        return ""
    if words[0] not in TOOLS:
        return in_a_shell(line, path)
    stdin = ""
    if words[-2:-1] == ["<"]:
        stdin = (path / words[-1]).read_text(encoding="utf-8")
        words = words[:-2]
    file = None
    if words[-2:-1] == [">"]:
        file = path / words[-1]
        words = words[:-2]
    start = [*TOOLS[words[0]], *words[1:]]
    launched = Folder(path).fork(*start, ranks=ranks, env=env, stdin=stdin)
    if file is None:
        return shown(launched.code, launched.out, launched.err)
    file.write_text(launched.out, encoding="utf-8")
    return shown(launched.code, "", launched.err)


def write_run(folder: Path, file: Path) -> None:
    """Write a run directory: norms of parameters, and other rows and events, all of them on each rank."""
    about = yaml.safe_load(file.read_text(encoding="utf-8"))
    path = folder / about.get("path", "run")
    ranks = range(about.get("ranks", 1))
    writers = [write(path, about["histories"], rank=rank) for rank in ranks]
    for writer in writers:
        for stat, name, step, value in about.get("rows", []):
            add(writer, Key("norms", stat, "accumulated", (name,)), step, values(value))
        for rule, numbers in about.get("statuses", {}).items():
            writer.statuses({rule: RuleStatus(**numbers)})
        for event in about.get("events", []):
            writer.event(Event(rank=writer.rank, **event))
    for writer in writers:
        writer.close()


@pytest.mark.slow
@pytest.mark.cover_children
@pytest.mark.parametrize(
    "case", [pytest.param(path, id=path.stem) for path in sorted(CASES.glob("*.txt"))]
)
def test_a_transcript_comes_out_as_it_is_written(case: Path, tmp_path: Path) -> None:
    text = case.read_text(encoding="utf-8")
    assert replayed(text, tmp_path, run_command) == text


if __name__ == "__main__":
    for name in sys.argv[1:]:
        case = CASES / f"{name}.txt"
        with tempfile.TemporaryDirectory() as folder:
            text = replayed(case.read_text(encoding="utf-8"), Path(folder), run_command)
        case.write_text(text, encoding="utf-8")
