"""Backward passes that come before an optimizer, and those of scripts that never build one."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import NORMS, Folder

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

HALF = (
    "  - {id: half, action: scale, factor: 0.5, params: '*', at: step, steps: {from: 0, to: 1}}\n"
)
FREEZE = "  - {id: still, action: freeze, params: '*.bias'}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


ANALYSED = """
import torch
from torch import nn
torch.manual_seed(0)
encoder = nn.Linear(2, 2)
x = torch.ones(1, 2, requires_grad=True)
for _ in range(3):
    encoder(x).sum().backward()
encoder.zero_grad()
print("analysed")
model = nn.Sequential(encoder, nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print("step", step)
print([param.tolist() for param in model.parameters()])
"""


@pytest.mark.parametrize("params", ["1.*", "*"])
def test_a_model_that_only_a_backward_pass_has_reached_gives_way_to_the_one_that_is_trained(
    folder: Folder, params: str
) -> None:
    done = folder.run(ANALYSED, rules=f"  - {{id: norms, action: norm-log, params: '{params}'}}\n")
    assert done.code == 0, done.lines
    (header,) = done.headers()
    assert header.endswith("on Sequential (4 parameters, 9 elements, updated by SGD)")
    assert folder.databases() == ["run/rank-0.db"]
    assert folder.steps("1.weight") == [0, 1, 2]
    assert "gradsurgeon: Sequential, 3 steps" in done.lines


def test_rules_are_checked_at_the_first_step_of_an_optimizer_all_the_same(folder: Folder) -> None:
    done = folder.run(
        ANALYSED, rules=f"{NORMS}  - {{id: gone, action: zero, params: 'decodr.*'}}\n"
    )
    assert done.code == 1
    assert done.out == "analysed\n"
    assert any(
        'rule gone: no parameter of the model matches "decodr.*"' in one for one in done.lines
    )
    assert "the model has 4 names" in done.lines[-1]


# The same model before and after, and an optimizer that comes at different moments.
SAME = """
import torch, gradsurgeon
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
def forth():
    return model(torch.ones(1, 2)).square().sum()
{before}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{after}
for step in range(2):
    optimizer.zero_grad()
    forth().backward()
    optimizer.step()
print([param.tolist() for param in model.parameters()])
"""
MOMENTS = {
    "three passes, then zeros": ("for _ in range(3): forth().backward()", "", ""),
    "between the pass and the step": (
        "forth().backward()",
        "optimizer.step()",
        "optimizer.zero_grad(); forth().backward(); optimizer.step()",
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_steps_count_from_the_first_of_the_optimizer(folder: Folder, moment: str) -> None:
    rules = NORMS + HALF + FREEZE
    before, after, instead = MOMENTS[moment]
    done = folder.run(SAME.format(before=before, after=after), rules=rules)
    assert done.code == 0, done.lines
    inside = f"gradsurgeon.apply(model, 'rules.yaml')\n{instead or after}"
    expected = folder.run(SAME.format(before="", after=inside), rules=rules, record=False, env=OFF)
    assert expected.code == 0, expected.lines
    assert done.out == expected.out
    (header,) = done.headers()
    assert header.endswith("on Sequential (4 parameters, 9 elements, updated by SGD)")
    steps = [0, 1, 2] if after else [0, 1]
    assert folder.steps("1.weight") == steps
    assert f"gradsurgeon: Sequential, {len(steps)} steps" in done.lines


OFF = {"GRADSURGEON_DISABLE": "1"}

BY_HAND = """
import torch
from torch import nn
torch.manual_seed(0)
seen = nn.Linear(2, 1)
model = nn.Linear(2, 2)
for _ in range({analysed}):
    seen(torch.ones(1, 2)).sum().backward()
for step in range(3):
    model(torch.ones(1, 2)).square().sum().backward()
    {update}
    model.zero_grad()
    print("step", step)
"""
UPDATES = {
    "in place": "with torch.no_grad(): model.weight -= 0.1 * model.weight.grad",
    "data": "model.weight.data.sub_(0.1 * model.weight.grad)",
    "new data": "model.weight.data = model.weight.data - 0.1 * model.weight.grad",
}


@pytest.mark.parametrize(("update", "analysed"), [("in place", 0), ("data", 2), ("new data", 0)])
def test_an_update_by_hand_makes_a_model_one_that_is_trained(
    folder: Folder, update: str, analysed: int
) -> None:
    done = folder.run(BY_HAND.format(analysed=analysed, update=UPDATES[update]))
    assert done.code == 0, done.lines
    (header,) = done.headers()
    assert "(2 parameters, 6 elements)" in header
    # The one that was looked at first is gone, the other one keeps its name.
    place, title = ("run/Linear-2", "Linear-2") if analysed else ("run", "Linear")
    assert folder.databases() == [f"{place}/rank-0.db"]
    assert folder.steps("weight", place) == [0, 1, 2]
    assert f"gradsurgeon: {title}, 3 steps" in done.lines


def test_models_that_are_updated_by_hand_together_are_both_found(folder: Folder) -> None:
    script = """
import torch
from torch import nn
pair = nn.Linear(2, 2), nn.Linear(2, 1)
for step in range(3):
    for model in pair:
        model.zero_grad()
        model(torch.ones(1, 2)).square().sum().backward()
    for model in pair:
        model.weight.data.sub_(0.1 * model.weight.grad)
"""
    done = folder.run(script)
    assert done.code == 0, done.lines
    assert len(done.headers()) == 2
    assert folder.steps("weight") == folder.steps("weight", "run/Linear-2") == [0, 1, 2]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("  - {id: gone, action: zero, params: 'decodr.*'}\n", "rule gone: no parameter"),
        (
            "  - {id: still, action: freeze, params: bias}\n",
            "rule still: weights are updated by hand",
        ),
    ],
)
def test_what_cannot_act_on_updates_by_hand_is_refused_once_one_is_seen(
    folder: Folder, rules: str, text: str
) -> None:
    done = folder.run(BY_HAND.format(analysed=0, update=UPDATES["data"]), rules=NORMS + rules)
    assert done.code == 1
    assert done.out == "step 0\n"
    assert any(text in line for line in done.lines), done.lines


def test_gradients_that_were_edited_and_added_to_are_refused_once_they_are_used(
    folder: Folder,
) -> None:
    script = """
import torch
from torch import nn
model = nn.Linear(2, 1)
for step in range(2):
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None
    print("step", step)
"""
    rules = "  - {id: half, action: scale, factor: 0.5, params: '*', at: step}\n"
    done = folder.run(script, rules=rules)
    assert (done.code, done.out) == (1, "step 0\n")
    (said,) = [line for line in done.lines if "the edit would compound" in line]
    # Nobody in the script has a session yet.
    assert "gradsurgeon.apply(model, rules, optimizer=[]), and call tick() of that session" in said
    # Without an edit the second pass goes on with the step of the first.
    done = folder.run(script, record=False)
    assert (done.code, done.out) == (0, "step 0\nstep 1\n")


def test_a_model_that_nobody_updates_is_still_recorded_where_there_is_no_other(
    folder: Folder,
) -> None:
    done = folder.run(
        "import torch\nmodel = torch.nn.Linear(2, 1)\nmodel(torch.ones(1, 2)).sum().backward()\n"
    )
    assert done.code == 0, done.lines
    assert len(done.headers()) == 1
    assert folder.steps("weight") == [0]
