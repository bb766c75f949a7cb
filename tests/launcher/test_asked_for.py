"""Where rules or records that were asked for cannot be had, nothing trains; what was asked for is named as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import TIMEOUT
from commands import environment
from outside import NORMS, Folder

import gradsurgeon

pytestmark = pytest.mark.slow

ODD = os.fsdecode(b"run\xff")
TRAP = "  - {id: trap, action: nan-trap, params: '*', then: skip-step}\n"
NAN = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
(model(torch.ones(1, 2)).sum() * float("nan")).backward()
optimizer.step()
print("NaN" if model.weight.isnan().any() else "finite")
"""


def launch(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**environment(), **more},
        capture_output=True,
        check=False,
        timeout=TIMEOUT,
    )


@pytest.mark.cover_children
def test_names_of_files_are_bytes(folder: Folder) -> None:
    done = folder.run(NAN, "--record", ODD, rules=TRAP, record=False)
    assert (done.code, done.out) == (0, "finite\n"), done.lines
    assert "  records: " + str(folder.path / "run") + "\\udcff" in done.lines
    with gradsurgeon.open_run(folder.path / ODD) as run:
        assert next(event.kind for event in run.events if event.rule == "trap") == "trap"


@pytest.mark.parametrize("empty", ["", ":src", "src:", "src::other"])
def test_an_empty_entry_of_the_path_is_the_working_directory(folder: Folder, empty: str) -> None:
    (folder.path / "scripts").mkdir()
    script = "import sys\nprint(sys.path)\n"
    (folder.path / "scripts" / "show.py").write_text(script, encoding="utf-8")
    (folder.path / "rules.yaml").write_text(f"version: 1\nrules:\n{NORMS}", encoding="utf-8")
    path = {"PYTHONPATH": empty}
    plain = launch(folder.path, "scripts/show.py", **path)
    # Where the package is only found by the path, the launcher has to find it in another way.
    start = f"import sys; sys.path.insert(0, {environment()['PYTHONPATH']!r}); "
    start += "from gradsurgeon.cli import main; sys.exit(main())"
    own = ("-c", start, "run", "--rules", "rules.yaml", "scripts/show.py")
    launched = launch(folder.path, *own, **path)
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout == plain.stdout
    assert (str(folder.path).encode() + b"'" in plain.stdout) == (empty != "")


@pytest.mark.cover_children
def test_a_working_directory_that_is_gone(folder: Folder) -> None:
    rules, script = folder.path / "rules.yaml", folder.path / "other.py"
    rules.write_text(f"version: 1\nrules:\n{NORMS}", encoding="utf-8")
    script.write_text("import sys\nprint('other', [one for one in sys.path if 'bootstrap' in one])")
    start = (
        "import os, sys; os.rmdir(os.getcwd()); from gradsurgeon.cli import main; sys.exit(main())"
    )
    told = {}
    for words in (
        ("lint", str(rules)),
        ("run", "--rules", str(rules), str(script)),
        ("run", "--rules", str(rules), "--dry-run", str(script)),
        ("run", "--rules", str(rules), "--record", "run", str(script)),
    ):
        (folder.path / "gone").mkdir()
        done = launch(folder.path / "gone", "-c", start, *words)
        told[words[-2]] = (done.returncode, done.stdout.decode(), done.stderr.decode())
    gone = (
        2,
        "",
        "gradsurgeon: cannot go on: No such file or directory\n",
    )
    assert told[str(rules)] == (0, "other []\n", "")
    assert told["lint"] == told["--dry-run"] == told["run"] == gone
