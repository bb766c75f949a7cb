"""`gradsurgeon lint`, and what all commands have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import WITHOUT_TORCH, call, environment, quiet, write_rules

from gradsurgeon import cli

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_rules(tmp_path)
    return tmp_path


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
