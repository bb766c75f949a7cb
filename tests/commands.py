"""The command line as a user has it: a process, or a fork, its exit code, and its two streams."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from unittest import mock

import forks
from bounds import TIMEOUT

from gradsurgeon import cli

ROOT = Path(cli.__file__).parent.parent.parent

# Torch that cannot be imported, and a word at the end on whether anything tried.
WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError("torch was imported")
sys.meta_path.insert(0, Refuse())
from gradsurgeon.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""

CLEAN = 'version: 1\nrules:\n  - {id: norms, action: norm-log, params: "*"}\n'
LINTED = (
    "1 file clean; whether patterns match a model: gradsurgeon plan FILE --model MODULE:BUILD\n"
)
EDITS = CLEAN + '  - {id: no-bias, action: zero, params: "*.bias"}\n'


def call(
    *arguments: str,
    cwd: Path,
    code: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Call the command, in a fork of a Python that has imported torch where nothing else is asked for.

    Args:
        arguments: what comes after `gradsurgeon`.
        cwd: the working directory.
        code: what a process of its own runs instead of the module.
        env: further variables, for a process of its own: Python reads some when it starts.
    """
    if code is None and env is None:
        return forked("-m", "gradsurgeon", *arguments, cwd=cwd)
    start = ["-m", "gradsurgeon"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=cwd,
        env={**environment(), **(env or {})},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=TIMEOUT,
        check=False,
    )


def forked(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Do in a fork of a Python that has imported torch what `python` does with these words."""
    done = forks.start(words, cwd=cwd, env={**environment(), **env}).wait(TIMEOUT)
    out, err = (
        io.TextIOWrapper(io.BytesIO(text), encoding="utf-8").read()
        for text in (done.stdout, done.stderr)
    )
    return subprocess.CompletedProcess(words, done.returncode, out, err)


def call_here(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Do in this process, which has imported torch already, what `call` does in one of its own."""
    known, before = set(sys.modules), Path.cwd()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
        mock.patch.dict(os.environ, environment(), clear=True),
        mock.patch.object(sys, "path", ["", *sys.path]),
        _instead("stdout", out),
        _instead("stderr", err),
    ):
        err.reconfigure(line_buffering=True)
        os.chdir(cwd)
        try:
            code = cli.main(arguments)
        except SystemExit as end:  # argparse
            code = end.code if isinstance(end.code, int) else 1
        finally:
            os.chdir(before)
            # The models of the next test have the same names.
            for name in set(sys.modules) - known:
                if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(cwd)):
                    del sys.modules[name]
        sys.stdout.flush()
        sys.stderr.flush()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


@contextmanager
def _instead(name: str, stream: IO[str]) -> Iterator[None]:
    """Let a stream be another one, and the descriptor below it, which children of ours write to."""
    number = {"stdout": 1, "stderr": 2}[name]
    own = os.dup(number)
    os.dup2(stream.fileno(), number)
    try:
        with mock.patch.object(sys, name, stream):
            yield
    finally:
        os.dup2(own, number)
        os.close(own)


def git(folder: Path, *arguments: str) -> str:
    """Run git as somebody who has configured nothing; return what it prints."""
    fixed = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *fixed, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def pasted(language: str = "") -> str:
    """Return what the guide tells to paste for editors and CI, in that language."""
    page = (ROOT / "rules" / "guide" / "ci.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return "\n".join(text for kind, text in blocks if kind == language)


def environment() -> dict[str, str]:
    """Return an environment in which a process anywhere finds this gradsurgeon."""
    fixed = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", "COLUMNS": "100"}
    return {**os.environ, **fixed}


def write_rules(folder: Path) -> None:
    """Write rule files: clean, with a warning, with an error, and for another model."""
    (folder / "clean.yaml").write_text(CLEAN)
    (folder / "edits.yaml").write_text(EDITS)
    (folder / "warned.yaml").write_text(CLEAN.replace("norm-log", "scale, factor: 0"))
    (folder / "wrong.yaml").write_text(CLEAN.replace("norm-log", "norm-lg"))
    (folder / "astray.yaml").write_text(CLEAN.replace('"*"', '"head.*"'))


def refused(done: subprocess.CompletedProcess[str]) -> None:
    """Show that a command could not do what it was asked for, and printed nothing."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr


def quiet(done: subprocess.CompletedProcess[str]) -> None:
    """Show that a command has done what it was asked for, and had nothing to say of it."""
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
