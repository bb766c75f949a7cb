"""Where the rules do not get into what is run, somebody says so: before, or at the end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import environment
from outside import TRAIN, Folder

from gradsurgeon.integrations.launcher.settings import BOOTSTRAP

pytestmark = pytest.mark.slow

# Isolated, the interpreter does not look at PYTHONPATH for the package either.
START = f"import sys; sys.path.insert(0, {environment()['PYTHONPATH']!r}); from gradsurgeon.cli import main; sys.exit(main())"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.write(TRAIN)
    (tmp_path / "tmp").mkdir()
    return made


def ours(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("gradsurgeon")]


@pytest.mark.cover_children
@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_flags_that_keep_the_rules_out_are_named(flag: str, folder: Folder) -> None:
    refused = folder.start(flag, "-c", START, "run", "--rules", "rules.yaml", "train.py")
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = ours(refused.stderr.splitlines())
    assert line.endswith("start Python without -I, -E and -S")


@pytest.mark.cover_children
def test_a_command_ends_as_it_would(folder: Folder) -> None:
    command = ("--rules", "rules.yaml", "--", "bash", "-c", "echo $PPID; kill -9 $$")
    done = folder.start("-c", START, "run", *command)
    assert done.returncode == -9
    # It is no child of the launcher but the launcher itself.
    assert done.stdout == f"{os.getpid()}\n"
    assert ours(done.stderr.splitlines()) == []


@pytest.mark.cover_children
def test_an_installation_that_is_broken_is_one_line(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = folder.path / "broken"
    (broken / "gradsurgeon").mkdir(parents=True)
    init = broken / "gradsurgeon" / "__init__.py"
    init.write_text("raise OSError('a file is missing')\n", encoding="utf-8")
    folder.write("import torch\nprint('trained')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BOOTSTRAP), str(broken)]))
    done = folder.start("train.py")
    assert done.stderr == "gradsurgeon: the script runs without rules: a file is missing\n"
    assert (done.returncode, done.stdout) == (0, "trained\n")
