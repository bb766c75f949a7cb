"""Where the rules do not get into what is run, somebody says so: before, or at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import TIMEOUT
from commands import environment
from outside import NORMS, TRAIN

from gradsurgeon.integrations.launcher.settings import BOOTSTRAP

pytestmark = pytest.mark.slow

CHILD = (
    f"import subprocess, sys, torch\nsubprocess.run([sys.executable, '-c', {TRAIN!r}], check=True)"
)
IDLE = "gradsurgeon: no rule acted: "


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "rules.yaml").write_text(f"version: 1\nrules:\n{NORMS}", encoding="utf-8")
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    return tmp_path


def run(place: Path, *words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    # Isolated, the interpreter does not look at PYTHONPATH for the package either.
    package = environment()["PYTHONPATH"]
    start = f"import sys; sys.path.insert(0, {package!r}); from gradsurgeon.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, *flags, "-c", start, "run", "--rules", "rules.yaml", *words],
        cwd=place,
        env={**environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(place / "tmp")},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )


def ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("gradsurgeon")]


@pytest.mark.cover_children
@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_flags_that_keep_the_rules_out_are_named(flag: str, place: Path) -> None:
    refused = run(place, "train.py", flags=(flag,))
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = ours(refused)
    assert line.endswith("start Python without -I, -E and -S")


SCRIPTS = {
    "torch alone": ("import torch", IDLE),
    "a child trains": (CHILD, ""),
    "a traceback tells why": ("import torch\nraise KeyError('of its own')", ""),
    "no torch": ("print('no torch')", ""),
}


@pytest.mark.cover_children
@pytest.mark.parametrize("what", SCRIPTS)
def test_a_command_of_this_python_says_that_no_rule_acted(what: str, place: Path) -> None:
    script, said = SCRIPTS[what]
    (place / "some.py").write_text(script, encoding="utf-8")
    done = run(place, "--", sys.executable, "some.py")
    assert done.returncode == int("raise" in script)
    assert [line.startswith(IDLE) for line in ours(done)].count(True) == bool(said), done.stderr
    assert not list((place / "tmp").glob("gradsurgeon-*"))


def test_a_shell_says_nothing_and_leaves_nothing_behind(place: Path) -> None:
    (place / "some.py").write_text("import torch", encoding="utf-8")
    done = run(place, "--", "bash", "-c", f"{sys.executable} some.py; exit 7")
    assert (done.returncode, ours(done)) == (7, [])
    assert not list((place / "tmp").glob("gradsurgeon-*"))


@pytest.mark.cover_children
def test_a_command_ends_as_it_would(place: Path) -> None:
    done = run(place, "--", "bash", "-c", "echo $PPID; kill -9 $$")
    assert done.returncode == -9
    # It is no child of the launcher but the launcher itself.
    assert done.stdout == f"{os.getpid()}\n"
    assert ours(done) == []


def test_nothing_is_left_behind(place: Path) -> None:
    done = run(place, "train.py")
    assert " parameters, " in done.stderr
    assert not list((place / "tmp").glob("gradsurgeon-*"))


@pytest.mark.cover_children
def test_an_installation_that_is_broken_is_one_line(place: Path) -> None:
    (place / "broken" / "gradsurgeon").mkdir(parents=True)
    init = place / "broken" / "gradsurgeon" / "__init__.py"
    init.write_text("raise OSError('a file is missing')\n", encoding="utf-8")
    told = {
        "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), str(place / "broken")]),
    }
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=place,
        env={**environment(), **told},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == "gradsurgeon: the script runs without rules: a file is missing\n"
    assert (done.returncode, done.stdout) == (0, "trained\n")
