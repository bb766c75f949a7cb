"""Where rules or records that were asked for cannot be had, nothing trains; what was asked for is named as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import TIMEOUT
from commands import LINTED, environment
from outside import NORMS, TRAIN, Folder

import gradsurgeon

pytestmark = pytest.mark.slow

ODD = os.fsdecode(b"run\xff")
TRAP = "  - {id: trap, action: nan-trap, params: '*', then: skip-step}\n"
CLIP = "  - {id: clip, action: clip-norm, params: '*', max_norm: 1}\n"
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


BROKEN = """
import torch, gradsurgeon.language.planning
def bind(*arguments, **named):
    raise ZeroDivisionError
gradsurgeon.language.planning.bind = bind
"""


@pytest.mark.cover_children
def test_a_fault_of_ours_does_not_end_in_training_without_rules(folder: Folder) -> None:
    done = folder.run(BROKEN + TRAIN)
    assert (done.code, done.out) == (1, "")
    assert done.lines[-1] == "ZeroDivisionError"
    off = folder.run(BROKEN + TRAIN, env={"GRADSURGEON_DISABLE": "1"})
    assert (off.code, off.out, off.lines) == (0, "trained\n", [])


MINE = '{"learning_rate": 0.1}\n'


@pytest.mark.cover_children
def test_a_dry_run_replaces_only_a_manifest(folder: Folder) -> None:
    file = folder.path / "params.json"
    file.write_text(MINE, encoding="utf-8")
    done = folder.run(TRAIN, "--dry-run", record=False)
    assert done.code == 2, done.lines
    assert "norms" in done.out
    assert file.read_text(encoding="utf-8") == MINE
    assert done.lines == [
        f"gradsurgeon: dry run: error: cannot write {file}: {file}: is there already and is no params.json; "
        "name another one, or remove it first"
    ]
    file.unlink()
    for _ in range(2):
        done = folder.run(TRAIN, "--dry-run", record=False)
        assert (done.code, done.lines) == (0, [f"gradsurgeon: dry run: wrote {file}"])
        assert '"origin": "Linear"' in file.read_text(encoding="utf-8")


@pytest.mark.cover_children
def test_the_summary_counts_the_steps_of_this_run(folder: Folder) -> None:
    done = folder.run(TRAIN, "--start-step", "100")
    assert "gradsurgeon: Linear, 1 step, from step 100" in done.lines
    assert folder.steps("weight") == [100]


ROOTS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    sign = -1.0 if step > 2 else 1.0
    optimizer.zero_grad()
    model(torch.ones(1, 2)).abs().mul(sign).sqrt().sum().backward()
    optimizer.step()
"""


@pytest.mark.cover_children
def test_the_summary_tells_equal_events_once_and_the_first_diagnosis(folder: Folder) -> None:
    done = folder.run(ROOTS, rules=TRAP)
    start = next(at for at, line in enumerate(done.lines) if line.endswith("Linear, 6 steps"))
    band, words, _, *shown = done.lines[start + 1 :]
    assert band.startswith("  look: step 3: NaN born in the forward pass outside of the model")
    assert words == "  ended, 3 steps skipped"
    assert [line.partition(":")[0].strip() for line in shown] == [
        "trap", "skipped-step", "next", "next",
    ]  # fmt: skip
    assert [line.endswith(" (x3, steps 3..5)") for line in shown[:2]] == [True, True]
    assert shown[2] == f"  next: gradsurgeon report {folder.path / 'run'}"


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
        "gradsurgeon: the working directory does not exist any more: change to another one\n",
    )
    assert told["lint"] == (0, "", LINTED)
    assert told[str(rules)] == (0, "other []\n", "")
    assert told["--dry-run"] == told["run"] == gone


@pytest.mark.parametrize("how", ["sys.stderr.close()", "sys.stderr = None"])
def test_a_script_may_do_without_stderr(folder: Folder, how: str) -> None:
    done = folder.run(f"import sys\n{how}\n{NAN}", rules=TRAP)
    # Nothing of ours is in what the script prints.
    assert (done.code, done.out) == (0, "finite\n"), done.lines
