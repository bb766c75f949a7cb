"""Records that are lost when a script ends: nobody sees a warning any more, and the summary says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import NORMS, Folder

pytestmark = pytest.mark.slow

SCRIPT = """
import pathlib, shutil, sys, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
run = pathlib.Path("run")
if sys.argv[1] == "removed":
    shutil.rmtree(run)
elif sys.argv[1] == "state":
    (run / "state-0.pt").mkdir()
print("done")
"""
RULES = NORMS + "  - {id: kept, action: capture, params: '*'}\n"


@pytest.mark.parametrize(
    ("how", "said", "quiet"),
    [
        ("removed", "records are no longer written to ", []),
        (
            "state",
            "the state to resume from could not be written, and training goes on: Is a directory",
            ["--quiet"],
        ),
        ("nothing", "", []),
    ],
)
def test_what_is_lost_at_the_end_is_said(
    tmp_path: Path, how: str, said: str, quiet: list[str]
) -> None:
    done = Folder(tmp_path).run(SCRIPT, *quiet, rules=RULES, launch=("train.py", how))
    assert (done.code, done.out) == (0, "done\n")
    lost = [line for line in done.lines if "error" in line]
    assert len(lost) == bool(said)
    assert all(line.startswith(f"gradsurgeon: error: Linear: {said}") for line in lost)
    # Nobody is sent to a directory that is not there.
    assert ("gradsurgeon report" in done.err) == (how != "removed" and not quiet)
