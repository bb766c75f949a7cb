"""Nothing reads a tensor whose storage is gone, as FSDP leaves it between passes: a read would end the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import Folder
from pairs import slow

# A parameter that is there from the forward pass to its gradient, and gone else.
GATHERED = """
import torch
from torch import nn
from torch.nn import functional
torch.manual_seed(0)
gathered = nn.Parameter(torch.empty(4, 4))

def free(tensor=gathered):
    tensor.untyped_storage().resize_(0)

def fill(tensor=gathered):
    tensor.untyped_storage().resize_(4 * tensor.numel())
    with torch.no_grad():
        tensor.fill_(0.1)

def gone_after_its_gradient(param):
    param.grad = None
    free()

gathered.register_post_accumulate_grad_hook(gone_after_its_gradient)
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(25):
    optimizer.zero_grad()
    fill()
    loss_of(torch.randn(8, 4)).backward()
    free()
    optimizer.step()
print("trained")
"""
# Adds 0, with a gradient of NaN in one step.
NAN = """
def root(tensor, step=[0]):
    step[0] += 1
    return (tensor * 0).sqrt().sum() if step[0] == 3 else 0.0
"""
LEAF = """
model = nn.Linear(4, 4)
def loss_of(x):
    return model(x @ gathered).square().mean()
"""
ARGUMENT = """
class Given(nn.Linear):
    def forward(self, x, weight):
        return super().forward(x @ weight) + root(self.bias)
model = Given(4, 4)
def loss_of(x):
    return model(x, gathered).square().mean()
"""
LOSS = """
class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x) + root(self.bias)
model = Model(4, 4)
def loss_of(x):
    return (model(x) @ gathered).square().mean() / gathered.mean()
"""
OUTPUT = """
class Shows(nn.Linear):
    def forward(self, x):
        return super().forward(x @ gathered), gathered
model = nn.Sequential(Shows(4, 4))
def free_and_fill(module, args, output):
    free()
model.register_forward_hook(free_and_fill)
model[0].register_forward_hook(free_and_fill)
def loss_of(x):
    out, _ = model(x)
    fill()
    return out.square().mean()
"""
BUFFER = """
class Masked(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mask", torch.empty(4, 4))
        free(self.mask)
    def forward(self, x):
        fill(self.mask)
        out = super().forward(x @ self.mask)
        free(self.mask)
        return out
model = Masked()
def loss_of(x):
    return model(x).square().mean()
"""
COPY = """
import copy
class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(4, 4)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        free(self.average.weight)
keeper = Keeper()
model = keeper.model
def loss_of(x):
    return model(x).square().mean()
"""
CASES = {
    "leaf": LEAF,
    "argument": NAN + ARGUMENT,
    "saved by the loss": NAN + LOSS,
    "output": OUTPUT,
    "buffer": BUFFER,
    "copy beside the model": COPY,
}
ON_MODULES = "  - {id: out, action: norm-log, modules: '*', tensor: output}\n"


@pytest.mark.parametrize("case", [*list(CASES)[::2], *slow(*list(CASES)[1::2])])
def test_the_default_pack_reads_no_storage_that_is_gone(case: str, tmp_path: Path) -> None:
    done = Folder(tmp_path).run(GATHERED + CASES[case] + LOOP, "--rules", "gradsurgeon:debug@1")
    assert done.code == 0, done.lines
    assert done.out == "trained\n"
    (looked,) = [line for line in done.lines if "checked 25 updates" in line]
    # After a trip the step is run again, and written to a bundle.
    trips = "root" in CASES[case]
    assert ("never tripped" in looked) is not trips, done.lines
    # What the model was given is gone.
    bundles = list(tmp_path.glob("run/trap-*"))
    assert len(bundles) == (trips and case != "argument"), done.lines


def test_rules_on_modules_leave_a_tensor_alone_whose_storage_is_gone(tmp_path: Path) -> None:
    done = Folder(tmp_path).run(GATHERED + OUTPUT + LOOP, rules=ON_MODULES, record=False)
    assert done.code == 0, done.lines
    assert done.out == "trained\n"
    assert any("left a tensor alone that has no numbers to read" in line for line in done.lines)


def test_a_diagnosis_says_that_an_argument_is_gone(tmp_path: Path) -> None:
    done = Folder(tmp_path).run(
        GATHERED + CASES["argument"] + LOOP, "--rules", "gradsurgeon:debug@1", record=False
    )
    assert any("an argument of the call has no numbers any more" in line for line in done.lines)
