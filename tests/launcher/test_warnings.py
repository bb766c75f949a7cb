"""What the package has to say are lines of the launcher, whatever filters and loggers the script sets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from outside import Folder

pytestmark = pytest.mark.slow

# A parameter is replaced in the second step, of which the session warns.
TRAIN = """
import sys, warnings, torch
from torch import nn
from tqdm import tqdm
def train(model, wrap=lambda model: model):
    for step in tqdm(range(3), mininterval=0, bar_format="{n_fmt}/{total_fmt} |{bar:10}|"):
        if step == 1:
            model.weight = nn.Parameter(model.weight.detach().clone())
            warnings.warn("of the script", stacklevel=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        wrapped = wrap(model)
        wrapped(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""
OURS = (
    "weight was replaced, renamed, taken out of its module, or tied to another parameter: no rule acts on it any more. "
    "Apply the rules again with replace=True"
)


SILENCES = {
    "nothing": "",
    "ignored": "warnings.filterwarnings('ignore')\n",
    "errors": "warnings.simplefilter('error')\n",
    "logging": "import logging.config\nlogging.config.dictConfig({'version': 1})\nlogging.disable()\n",
}


@pytest.mark.cover_children
@pytest.mark.parametrize("how", SILENCES)
def test_a_line_names_the_line_of_the_script_whatever_the_script_silences(
    tmp_path: Path, how: str
) -> None:
    script = TRAIN.replace('warnings.warn("of the script", stacklevel=1)', "pass")
    done = Folder(tmp_path).run(f"{script}{SILENCES[how]}train(nn.Linear(2, 1))\n", record=False)
    assert done.code == 0, done.err
    assert "Warning" not in done.err
    # A carriage return is none of the ends of a line.
    lines = [line.rpartition("\r")[2] for line in done.err.split("\n")]
    said = rf"gradsurgeon: {tmp_path}/train.py:\d+: {OURS}"
    assert [bool(re.fullmatch(said, line)) for line in lines].count(True) == 1, done.err


# A NaN is born in the forward pass of the fifth step, in one row.
NAN = """
import warnings, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
    def forward(self, x):
        x = self.first(x)
        return self.last(x / x.norm(dim=-1, keepdim=True))
torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(6):
    x = torch.randn(8, 4)
    if step == 4:
        x[5] = 0
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TRAP = "  - {id: no-nan, action: nan-trap, params: '*', then: THEN}\n"


@pytest.mark.cover_children
@pytest.mark.parametrize("then", ["warn", "skip-step"])
@pytest.mark.parametrize("how", SILENCES)
def test_a_diagnosis_comes_before_the_gradients_whatever_the_script_silences(
    tmp_path: Path, how: str, then: str
) -> None:
    script = f"import warnings\n{SILENCES[how]}{NAN}"
    done = Folder(tmp_path).run(script, rules=TRAP.replace("THEN", then), record=False)
    assert done.code == 0, done.err
    start, *lines = [line for line in done.lines if not line.startswith("  no-nan")]
    assert start.startswith("gradsurgeon: rules.yaml on Net")
    assert lines[0] == (
        "gradsurgeon: step 4, rule no-nan: NaN born in the forward pass of the root (Net): aten.div, reproduced"
    )
    assert lines[1].startswith(f"  at {tmp_path}/train.py:")
    assert lines[2] == "  all in row 5 of 8, from row 5 of the input"
    assert lines[3] == "  to try: a division by 0: `clamp(min=eps)` the divisor"
    outcome = {"warn": "the update goes on", "skip-step": "step skipped"}[then]
    gradients = next(at for at, line in enumerate(lines) if line.startswith("3 of 3 gradients"))
    assert outcome in lines[gradients]
    assert lines[gradients + 1] == "in the order in which backward produced them:"
    assert "Warning" not in done.err
    assert "optimizer.step()" not in done.err


@pytest.mark.cover_children
def test_a_trap_that_trips_again_names_its_step_and_no_line_of_the_script(tmp_path: Path) -> None:
    script = NAN.replace("if step == 4:", "if step > 4:").replace("range(6)", "range(15)")
    done = Folder(tmp_path).run(
        script, rules=TRAP.replace("THEN", "warn, give_up_after: never"), record=False
    )
    assert done.code == 0, done.err
    (again,) = [line for line in done.lines if "times so far" in line]
    assert again.startswith("gradsurgeon: step 14, rule no-nan: 3 of 3 gradients are not finite")
    assert not [line for line in done.lines if line.startswith(f"gradsurgeon: {tmp_path}/train.py")]


@pytest.mark.cover_children
def test_warnings_of_the_script_are_its_own(tmp_path: Path) -> None:
    done = Folder(tmp_path).run(f"{TRAIN}train(nn.Linear(2, 1))\n", record=False)
    assert f"{tmp_path}/train.py:9: UserWarning: of the script\n  warnings.warn(" in done.err


LOGGED = """
import logging, sys
log = logging.getLogger("gradsurgeon")
log.info("of no weight")
for number in tqdm(range(2), mininterval=0, bar_format="{n_fmt}/{total_fmt}"):
    log.warning("trap: step %d, rule %s", number, "trap")
logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
log.warning("skipped-step: step 2")
"""


@pytest.mark.cover_children
def test_what_is_logged_is_one_line_beside_the_bar_however_quiet(tmp_path: Path) -> None:
    script = f"{TRAIN}{LOGGED}train(nn.Linear(2, 1))\n"
    done = Folder(tmp_path).run(script, "--quiet", record=False)
    assert done.code == 0, done.err
    lines = [line.rpartition("\r")[2] for line in done.err.split("\n")]
    ours = [line for line in lines if line.startswith("gradsurgeon: ") and OURS not in line]
    assert ours == [
        "gradsurgeon: trap: step 0, rule trap",
        "gradsurgeon: trap: step 1, rule trap",
        "gradsurgeon: skipped-step: step 2",
    ]
    assert "of no weight" not in done.err
    # Where the script logs to, it is as in any other library.
    assert done.out == "skipped-step: step 2\n"
