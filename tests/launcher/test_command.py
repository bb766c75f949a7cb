"""The command line of the launcher: what is its own, what is the script's, what it tells its children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradsurgeon.integrations.launcher.command import parsed, script_command
from gradsurgeon.integrations.launcher.next_commands import with_records
from gradsurgeon.integrations.launcher.settings import BOOTSTRAP, Settings, from_environment

pytestmark = pytest.mark.cover_children

RULES = "version: 1\nrules:\n  - {id: norms, action: norm-log, params: '*'}\n"


@pytest.mark.parametrize(
    ("argv", "target"),
    [
        (["--rules", "r", "t.py", "--lr", "1"], ["t.py", "--lr", "1"]),
        (["--rules=r", "t.py"], ["t.py"]),
        (["--rules", "r", "-m", "pkg.train", "-m", "x"], ["-m", "pkg.train", "-m", "x"]),
        (["--rules", "r", "--", "torchrun", "t.py"], ["--", "torchrun", "t.py"]),
        (["--rules", "r", "t.py", "--rules", "mine"], ["t.py", "--rules", "mine"]),
        (["--rules", "r", "t.py", "--", "--rules", "mine"], ["t.py", "--", "--rules", "mine"]),
        (["--rules", "r", "-", "-m"], ["-", "-m"]),
        (["--rules", "r"], []),
    ],
)
def test_the_first_word_that_is_no_option_begins_the_script(
    argv: list[str], target: list[str]
) -> None:
    given = parsed(argv)
    assert (given["rules"], given["target"]) == ("r", target)


def test_a_script_is_run_by_this_interpreter() -> None:
    assert script_command(["t.py", "-x"])[0] == sys.executable
    assert script_command(["t.py", "-x"])[-2:] == ["t.py", "-x"]


def test_the_next_command_names_a_directory_that_holds_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    settings = Settings(rules="r.yaml")
    for number in (1, 2):
        begin = f"gradsurgeon run --rules r.yaml --record runs/{number} "
        assert with_records(settings).startswith(begin)
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        (tmp_path / "runs" / str(number) / "run.json").touch()


def test_settings_survive_the_environment(tmp_path: Path) -> None:
    given = Settings(
        rules=str(tmp_path / "r.yaml"),
        record=str(tmp_path / "run"),
        dry_run=str(tmp_path / "params.json"),
        start_step=0,
        sinks=("tensorboard:a", "wandb:b"),
        observe=True,
        pdb=True,
        quiet=True,
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
    ("given", "entries"),
    [
        ("", []),
        (":src", ["", "src"]),
        ("src:", ["src", ""]),
        (f"{BOOTSTRAP}::src", ["", "src"]),
        (":", ["", ""]),
    ],
)
def test_entries_of_the_path_stay_as_they_are(given: str, entries: list[str]) -> None:
    environment = Settings(rules="/r.yaml").environment({"PYTHONPATH": given})
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(BOOTSTRAP), *entries]


@pytest.mark.parametrize(
    "more",
    [{"GRADSURGEON_DISABLE": "1"}, {"GRADSURGEON_DISABLE": "yes"}, {"GRADSURGEON_OPTIONS": ""}],
)
def test_other_processes_are_left_alone(more: dict[str, str]) -> None:
    assert from_environment({**Settings(rules="/r.yaml").environment({}), **more}) is None


@pytest.mark.parametrize("off", ["", "0", "false", "No"])
def test_a_switch_that_is_off_is_off(off: str) -> None:
    given = Settings(rules="/r.yaml")
    assert from_environment({**given.environment({}), "GRADSURGEON_DISABLE": off}) == given


FLAGS = """\
import sys
print(sys.stdout.write_through, sys.flags.optimize, sorted(sys._xoptions))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [(), ("-u",), ("-u", "-O", "-X", "dev")],
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
