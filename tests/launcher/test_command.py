"""The command line of the launcher: what is its own, what is the script's, what it tells its children."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gradsurgeon.launcher.command import main, script_command, split
from gradsurgeon.launcher.settings import BOOTSTRAP, Settings, from_environment

RULES = "version: 1\nrules:\n  - {id: norms, action: norm-log, params: '*'}\n"


@pytest.mark.parametrize(
    ("argv", "own", "target"),
    [
        (["--rules", "r", "t.py", "--lr", "1"], ["--rules", "r"], ["t.py", "--lr", "1"]),
        (["--rules=r", "t.py"], ["--rules=r"], ["t.py"]),
        (
            ["--observe", "-m", "pkg.train", "-m", "x"],
            ["--observe"],
            ["-m", "pkg.train", "-m", "x"],
        ),
        (["--rules", "r", "--", "torchrun", "t.py"], ["--rules", "r"], ["--", "torchrun", "t.py"]),
        (["t.py", "--rules", "mine"], [], ["t.py", "--rules", "mine"]),
        (["--quiet"], ["--quiet"], []),
    ],
)
def test_the_first_word_that_is_no_option_begins_the_script(
    argv: list[str], own: list[str], target: list[str]
) -> None:
    assert split(argv) == (own, target)


def test_a_script_is_run_by_this_interpreter() -> None:
    assert script_command(["t.py", "-x"])[0] == sys.executable
    assert script_command(["t.py", "-x"])[-2:] == ["t.py", "-x"]


def test_settings_survive_the_environment(tmp_path: Path) -> None:
    given = Settings(
        rules=str(tmp_path / "r.yaml"),
        record=str(tmp_path / "run"),
        dry_run=str(tmp_path / "params.json"),
        start_step=7,
        observe=True,
        pdb=True,
        quiet=True,
        strict=True,
    )
    environment = given.environment({"PYTHONPATH": "elsewhere", "OTHER": "1"})
    assert from_environment(environment) == given
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(BOOTSTRAP), "elsewhere"]
    assert environment["OTHER"] == "1"
    # A launcher inside a launched process begins anew.
    again = Settings(rules=str(tmp_path / "s.yaml")).environment(environment)
    assert from_environment(again) == Settings(rules=str(tmp_path / "s.yaml"))
    assert again["PYTHONPATH"] == environment["PYTHONPATH"]


@pytest.mark.parametrize(
    "more",
    [
        {"GRADSURGEON_DISABLE": "1"},
        {"GRADSURGEON_DISABLE": "yes"},
        {"GRADSURGEON_PREFIX": "/another/interpreter"},
        {"GRADSURGEON_RULES": ""},
    ],
)
def test_other_processes_are_left_alone(more: dict[str, str]) -> None:
    assert from_environment({"GRADSURGEON_RULES": "/r.yaml", **more}) is None


@pytest.mark.parametrize("off", ["", "0", "false", "No"])
def test_a_switch_that_is_off_is_off(off: str) -> None:
    found = from_environment({"GRADSURGEON_RULES": "/r.yaml", "GRADSURGEON_DISABLE": off})
    assert found == Settings(rules="/r.yaml")


def test_a_step_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="GRADSURGEON_START_STEP is a number of steps, 0 or more"):
        from_environment({"GRADSURGEON_RULES": "/r.yaml", "GRADSURGEON_START_STEP": "-3"})


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--rules", "nowhere.yaml", "t.py"], "nowhere.yaml: there is no such rule file"),
        (["t.py"], "no rules are given: pass `--rules FILE`, or set GRADSURGEON_RULES"),
        (["--rules", "r.yaml"], "no script is given"),
        (["--rules", "r.yaml", "--"], "nothing follows `--`"),
        (
            ["--rules", "r.yaml", "--", "no-such-command"],
            "no-such-command: there is no such command",
        ),
        (["--rules", "r.yaml", "--record", "old", "t.py"], "old holds a run already"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_runs(
    argv: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRADSURGEON_RULES", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "r.yaml").write_text(RULES, encoding="utf-8")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}", encoding="utf-8")
    assert main(argv) == 2
    assert text in capsys.readouterr().err


def test_the_environment_does_the_same_without_the_command(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RULES, encoding="utf-8")
    (tmp_path / "t.py").write_text(
        "import os, sys; print(os.environ['GRADSURGEON_RULES'], sys.path)\n"
    )
    told = subprocess.run(
        [sys.executable, "-m", "gradsurgeon", "run", "--rules", "r.yaml", "--print-env"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pairs = [shlex.split(line)[1].partition("=") for line in told.splitlines()]
    environment = {**os.environ, **{key: value for key, _, value in pairs}}
    assert environment["GRADSURGEON_RULES"] == str(tmp_path / "r.yaml")
    seen = subprocess.run(
        [sys.executable, "t.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert seen.startswith(str(tmp_path / "r.yaml"))
    # The script does not see how the rules come in.
    assert "bootstrap" not in seen


FLAGS = """\
import sys
print(sys.stdout.write_through, sys.flags.inspect, sys.flags.optimize, sorted(sys._xoptions))
"""


@pytest.mark.parametrize(
    "flags",
    [(), ("-u",), ("-i",), ("-u", "-O", "-X", "dev", "-X", "int_max_str_digits=700")],
    ids=" ".join,
)
def test_a_script_has_the_flags_of_the_interpreter(flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RULES, encoding="utf-8")
    (tmp_path / "t.py").write_text(FLAGS, encoding="utf-8")
    launch = ("-m", "gradsurgeon", "run", "--rules", "r.yaml")
    environment = {key: v for key, v in os.environ.items() if key != "PYTHONUNBUFFERED"}
    plain, launched = (
        subprocess.run(
            [sys.executable, *flags, *how, "t.py"],
            cwd=tmp_path,
            env=environment,
            input="",
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for how in ((), launch)
    )
    assert launched == plain
