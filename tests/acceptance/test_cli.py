"""`gradsurgeon lint`, and what all commands have in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import CLEAN, LINTED, WITHOUT_TORCH, call, environment, quiet, write_rules

from gradsurgeon import cli
from gradsurgeon.actions import ACTIONS
from gradsurgeon.language.schema import VERSION

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

PARAMS = Path(__file__).parent.parent / "cases/review/params.json"
FOURTEEN = Path(__file__).parent.parent / "cases/schema/bad/fourteen-mistakes.yaml"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_rules(tmp_path)
    return tmp_path


class TestLint:
    def test_fourteen_mistakes_as_json_name_the_same(self, tmp_path: Path) -> None:
        (tmp_path / "rules.yaml").write_bytes(FOURTEEN.read_bytes())
        text = call("lint", "rules.yaml", "--format", "concise", cwd=tmp_path).stdout
        done = call("lint", "rules.yaml", "--format", "json", cwd=tmp_path)
        found = json.loads(done.stdout)
        assert (done.returncode, done.stderr, found["version"]) == (1, "", 1)
        lines = [
            f"{p['file']}:{p['line']}:{p['col']}: {p['severity']}: {p['message']}"
            f"{' (' + p['hint'] + ')' if p['hint'] else ''} [{p['check']}]"
            for p in found["problems"]
        ]
        assert lines == text.splitlines()
        assert set(found) == {"version", "problems"}
        keys = ["file", "line", "col", "severity", "check", "message", "hint"]
        assert all(list(problem) == keys for problem in found["problems"])

    def test_the_full_form_shows_line_and_remedy(self, here: Path) -> None:
        done = call("lint", "wrong.yaml", cwd=here)
        assert (done.returncode, done.stderr) == (1, "wrong.yaml: 1 error\n")
        assert done.stdout == (
            "wrong.yaml:3:25: error: unknown action `norm-lg` [unknown-action]\n"
            '     3 |   - {id: norms, action: norm-lg, params: "*"}\n'
            "       |                         ^^^^^^^\n"
            f"       = did you mean `norm-log`? known: {', '.join(ACTIONS)}\n\n"
        )

    def test_a_clean_file(self, here: Path) -> None:
        done = call("lint", "clean.yaml", cwd=here)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", LINTED)
        done = call("lint", "clean.yaml", "--format", "concise", cwd=here)
        assert done.stderr == "1 file clean\n"

    def test_warnings_do_not_fail(self, here: Path) -> None:
        done = call("lint", "warned.yaml", "--format", "concise", cwd=here)
        assert (done.returncode, done.stderr) == (0, "warned.yaml: 1 warning\n")
        assert done.stdout.startswith("warned.yaml:3:40: warning: scaling by 0 ")

    def test_several_files_and_each_once(self, here: Path) -> None:
        names = ("wrong.yaml", "clean.yaml", "warned.yaml", "wrong.yaml")
        done = call("lint", *names, "--format", "concise", cwd=here)
        assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
            "wrong.yaml",
            "warned.yaml",
        ]
        assert done.stderr == "3 files: 1 error, 1 warning\n"
        assert done.returncode == 1

    def test_a_file_that_cannot_be_read_does_not_hide_the_others(self, here: Path) -> None:
        (here / "binary.yaml").write_bytes(b"\x00\x01")
        done = call(
            "lint", "gone.yaml", "binary.yaml", ".", "wrong.yaml", "--format=json", cwd=here
        )
        found = [(p["file"], p["check"]) for p in json.loads(done.stdout)["problems"]]
        assert found == [
            ("gone.yaml", "unreadable-file"),
            ("binary.yaml", "unreadable-file"),
            (".", "unreadable-file"),
            ("wrong.yaml", "unknown-action"),
        ]
        assert done.returncode == 2

    def test_included_files_are_linted_too(self, here: Path) -> None:
        (here / "parts").mkdir()
        (here / "parts" / "wrong.yaml").write_bytes((here / "wrong.yaml").read_bytes())
        for name in ("top.yaml", "other.yaml"):
            (here / name).write_text("version: 1\ninclude: [parts/wrong.yaml, parts/gone.yaml]\n")
        done = call("lint", "top.yaml", cwd=here)
        assert (done.returncode, done.stderr) == (1, "top.yaml: 2 errors\n")
        assert done.stdout == (
            "top.yaml:2:29: error: there is no file `parts/gone.yaml` in the folder of the including "
            "file [bad-include]\n"
            "     2 | include: [parts/wrong.yaml, parts/gone.yaml]\n"
            "       |                             ^^^^^^^^^^^^^^^\n"
            "       = correct the path; packs are written gradsurgeon:NAME@N\n\n"
            "parts/wrong.yaml:3:25: error: unknown action `norm-lg` [unknown-action]\n"
            '     3 |   - {id: norms, action: norm-lg, params: "*"}\n'
            "       |                         ^^^^^^^\n"
            f"       = did you mean `norm-log`? known: {', '.join(ACTIONS)}\n\n"
        )
        # What two files share is wrong once.
        done = call("lint", "top.yaml", "other.yaml", "--format", "concise", cwd=here)
        assert len(done.stdout.splitlines()) == 3
        assert done.stderr == "2 files: 3 errors\n"

    def test_packs_are_read_without_torch(self, here: Path) -> None:
        (here / "top.yaml").write_text('version: 1\ninclude: ["gradsurgeon:nan-trap@1"]\n')
        done = call("lint", "top.yaml", cwd=here, code=WITHOUT_TORCH)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", LINTED)

    def test_terminal_codes_in_names_and_values_are_escaped(self, tmp_path: Path) -> None:
        (tmp_path / "a\x1b[2Jb.yaml").write_text(CLEAN.replace("norm-log", '"\\e[31mred"'))
        done = call("lint", "a\x1b[2Jb.yaml", cwd=tmp_path)
        assert done.returncode == 1
        assert "\x1b" not in done.stdout + done.stderr
        assert "a\\x1b[2Jb.yaml:3:25: error: unknown action `\\x1b[31mred`" in done.stdout

    def test_a_terminal_that_knows_only_ascii(self, tmp_path: Path) -> None:
        (tmp_path / "r.yaml").write_text(CLEAN.replace("norms", "层"), encoding="utf-8")
        done = call("lint", "r.yaml", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
        assert done.returncode == 1
        assert "`\\u5c42` is not a rule id" in done.stdout


class TestTheRest:
    @pytest.mark.parametrize(
        ("arguments", "code"),
        [
            (("lint", "clean.yaml"), 0),
            (("lint", "wrong.yaml", "--format", "json"), 1),
            (("explain",), 0),
            (("explain", "clamp"), 0),
            (("schema",), 0),
            (("--version",), 0),
            (("run", "train.py"), 2),
        ],
    )
    def test_no_torch(self, here: Path, arguments: tuple[str, ...], code: int) -> None:
        done = call(*arguments, cwd=here, code=WITHOUT_TORCH)
        assert "Error" not in done.stderr
        assert done.returncode == code

    def test_help_needs_neither_torch_nor_pydantic(self, tmp_path: Path) -> None:
        code = (
            "import sys\nfrom gradsurgeon.cli import main\n"
            "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
            "assert not {'torch', 'pydantic', 'yaml'} & set(sys.modules)"
        )
        done = call(cwd=tmp_path, code=code)
        quiet(done)
        assert done.stdout.startswith("usage: gradsurgeon [-h] [--version] COMMAND ...")

    def test_the_version(self, tmp_path: Path) -> None:
        done = call("--version", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, f"gradsurgeon {VERSION}\n")

    @pytest.mark.parametrize(
        "arguments",
        [
            ["lint"],
            ["lint", "x", "--form", "json"],
            ["lint", "x", "--format", "xml"],
            ["plan", "x"],
            ["--wrong"],
            ["lnit", "x"],
            ["--"],
        ],
    )
    def test_wrong_usage(self, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("usage: gradsurgeon")

    def test_nothing_at_all_shows_the_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([]) == 2
        assert capsys.readouterr().err.startswith("usage: gradsurgeon")

    def test_a_reader_that_stops_reading(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "gradsurgeon", "schema"]
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(),
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
        )
        os.close(write)
        assert (done.returncode, done.stderr) == (141, b"")

    def test_a_fault_of_ours_is_no_finding(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(_: object) -> int:
            raise RuntimeError("broken")

        monkeypatch.setattr("gradsurgeon.cli.schema.run", broken)
        assert cli.main(["schema"]) == 2
        err = capsys.readouterr().err
        assert "RuntimeError: broken" in err
        assert "gradsurgeon: internal error in gradsurgeon" in err
