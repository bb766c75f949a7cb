"""What public training scripts do that ours did not: the same in a few lines each."""

from __future__ import annotations

import pytest
from outside import NORMS, Folder

import gradsurgeon

pytestmark = pytest.mark.slow

IDLE = "gradsurgeon: no rule acted: "


AGENT = """
import torch
from torch import nn
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(3, 2)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters())
        self.critic = nn.Linear(3, 1)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        self.scale = nn.Parameter(torch.ones(()))
agent = Agent()
x = torch.ones(4, 3)
for _ in range(3):
    agent.actor_optimizer.zero_grad()
    (agent.actor(x) * agent.scale).square().sum().backward()
    agent.actor_optimizer.step()
    agent.critic_optimizer.zero_grad()
    agent.critic(x).square().sum().backward()
    agent.critic_optimizer.step()
"""


def test_a_model_that_builds_its_own_optimizers_is_found_whole(folder: Folder) -> None:
    done = folder.run(AGENT)
    assert done.code == 0, done.lines
    (header,) = done.headers()
    # Three of actor and critic are there when the first optimizer is built; the last when training begins.
    assert header.endswith("on agent (5 parameters, 13 elements, 4 of 5 updated by Adam and SGD)")
    assert folder.databases() == ["run/rank-0.db"]
    for name in ("actor.weight", "critic.weight", "scale"):
        assert folder.steps(name) == [0, 1, 2], name
    assert "gradsurgeon: agent, 3 steps" in done.lines
    assert not any("never" in line for line in done.lines)


def test_rules_for_what_comes_after_the_optimizer_match(folder: Folder) -> None:
    rules = "  - {id: late, action: norm-log, params: [critic.*, scale]}\n"
    done = folder.run(AGENT, rules=rules)
    assert done.code == 0, done.lines
    assert [line for line in done.lines if "late" in line] == [
        "  late  norm-log  at accumulated  3 parameters",
        "  late  norm-log  fired 9    last at step 2",
    ]


def test_layers_with_optimizers_of_their_own_have_their_full_names(folder: Folder) -> None:
    script = """
import torch
from torch import nn
class Layer(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
net = nn.Sequential(Layer(3, 2), Layer(2, 1))
for _ in range(3):
    x = torch.ones(4, 3)
    for layer in net:
        x = layer(x.detach())
        layer.optimizer.zero_grad()
        x.square().sum().backward()
        layer.optimizer.step()
"""
    done = folder.run(script)
    assert done.code == 0, done.lines
    (header,) = done.headers()
    assert "on Sequential (4 parameters, 11 elements, updated by SGD)" in header
    assert folder.databases() == ["run/rank-0.db"]
    assert folder.steps("0.weight") == folder.steps("1.weight") == [0, 1, 2]


def test_a_mere_wrapper_that_comes_later_renames_nothing(folder: Folder) -> None:
    script = """
import torch
from torch import nn
class Engine(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model
    def forward(self, x):
        return self.inner(x)
model = nn.Sequential(nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = Engine(model)
for _ in range(2):
    engine(torch.ones(4, 3)).sum().backward()
    optimizer.step()
"""
    done = folder.run(script)
    (header,) = done.headers()
    assert "on Sequential (2 parameters" in header
    assert folder.steps("0.weight") == [0, 1]


@pytest.mark.parametrize("first", ["ema", "optimizer"])
def test_an_average_that_holds_the_model_renames_nothing(first: str, folder: Folder) -> None:
    made = {
        "ema": "ema = EMA(model)",
        "optimizer": "optimizer = torch.optim.Adam(model.parameters(), lr=0.1)",
    }
    lines = [made.pop(first), *made.values()]
    script = """
import copy, torch
from torch import nn
class EMA(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.online_model = model
        self.ema_model = copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("step", torch.tensor(0))
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
{}
for i in range(3):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    done = folder.run(script.format("\n".join(lines)))
    assert done.code == 0, done.lines
    (header,) = done.headers()
    assert "on Sequential (4 parameters, 21 elements, updated by Adam)" in header
    assert folder.steps("0.weight") == [0, 1, 2]


def test_optimizers_that_are_made_in_the_first_update_are_no_news(folder: Folder) -> None:
    script = """
import torch
from torch import nn
m = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizers = {}
for i in range(4):
    m(torch.ones(2, 3)).square().sum().backward()
    for p in m.parameters():
        if p not in optimizers:
            optimizers[p] = torch.optim.SGD([p], lr=0.1)
        optimizers[p].step()
    m.zero_grad()
"""
    early = "  - {id: early, action: norm-log, params: '*', at: backward}\n"
    done = folder.run(script, rules=NORMS + early)
    assert done.code == 0, done.lines
    with gradsurgeon.open_run(folder.path / "run") as run:
        assert run.events == []
        for name in ("0.weight", "2.bias"):
            assert [step for step, _ in run.history(name, rule="norms")] == [0, 1, 2, 3]
            assert [step for step, _ in run.history(name, rule="early")] == [1, 2, 3]


def test_models_that_are_never_trained_are_one_line_each(folder: Folder) -> None:
    script = """
import torch
from torch import nn
nets = [nn.Linear(2, 1), nn.Linear(3, 1)]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
"""
    done = folder.run(script)
    assert done.lines == [
        "gradsurgeon: Linear: no gradient arrived, so no rule acted on it",
        "gradsurgeon: Linear-2: no gradient arrived, so no rule acted on it",
    ]


TARGET = """
import torch
from torch import nn
class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
value, target = Value(), Value()
for _ in range(3):
    value.optimizer.zero_grad()
    (value.net(torch.ones(2, 3)) - target.net(torch.ones(2, 3)).detach()).square().mean().backward()
    value.optimizer.step()
"""
CHECKED = "  checked: "
CHECKS = "  - {id: loop, action: check-loop, params: '*'}\n"


def test_a_model_that_no_gradient_reached_was_not_checked(folder: Folder) -> None:
    done = folder.run(TARGET, rules=CHECKS)
    assert done.code == 0, done.lines
    assert "gradsurgeon: Value-2: no gradient arrived, so no rule acted on it" in done.lines
    assert [line.startswith(CHECKED) for line in done.lines].count(True) == 1


DIES = """
import torch
class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("its own")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
Bad.apply(model(torch.ones(1, 2))).sum().backward()
"""


def test_a_script_that_dies_in_its_first_pass_was_not_checked(folder: Folder) -> None:
    done = folder.run(DIES, rules=CHECKS)
    assert done.code == 1
    assert "ValueError: its own" in done.lines
    assert "gradsurgeon: Linear: no gradient arrived, so no rule acted on it" in done.lines
    assert not any(line.startswith((CHECKED, "  never-fired")) for line in done.lines)


ONE_BY_ONE = """
import torch
weights = [torch.zeros(2, requires_grad=True) for _ in range(26)]
optimizers = {{}}
model = {model}
for _ in range(3):
    sum(weight.sum() for weight in weights).backward()
    for weight in [*weights, *model.parameters()]:
        if weight not in optimizers:
            optimizers[weight] = torch.optim.Adam([weight], lr=0.1)
        optimizers[weight].step()
        optimizers[weight].zero_grad()
"""


def test_parameters_in_no_module_are_one_line_with_their_number(folder: Folder) -> None:
    done = folder.run(ONE_BY_ONE.format(model="torch.nn.Identity()"))
    assert done.code == 0, done.lines
    assert done.lines == [
        "gradsurgeon: no rule acted: 26 parameters of Adam in no module; rules act on the parameters of a torch.nn.Module"
    ]
    done = folder.run(ONE_BY_ONE.format(model="torch.nn.Linear(2, 1)"), record=False)
    assert done.code == 0, done.lines
    said = "gradsurgeon: 26 parameters of Adam in no module: no rule acted there"
    assert [line for line in done.lines if "in no module" in line] == [said]


UNSEEN = {
    "by hand, once": """
import torch
model = torch.nn.Linear(2, 1)
model(torch.ones(1, 2)).sum().backward()
model.weight.data.sub_(0.1 * model.weight.grad)
""",
    "torch.func": """
import torch
from torch.func import functional_call, grad
model = torch.nn.Linear(2, 1)
weights = {name: param.detach() for name, param in model.named_parameters()}
def loss(weights):
    return functional_call(model, weights, (torch.ones(1, 2),)).sum()
gradients = grad(loss)(weights)
weights = {name: weights[name] - 0.1 * gradients[name] for name in weights}
""",
    "torch.autograd.grad": """
import torch
model = torch.nn.Linear(2, 1)
found = torch.autograd.grad(model(torch.ones(1, 2)).sum(), list(model.parameters()))
for param, gradient in zip(model.parameters(), found):
    param.data.sub_(gradient)
""",
    "no module": """
import torch
weight = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.sum().backward()
optimizer.step()
""",
    "no module, no optimizer": """
import torch
weight = torch.zeros(2, requires_grad=True)
weight.sum().backward()
""",
    "nothing": "import torch",
}


@pytest.mark.parametrize("how", UNSEEN)
def test_a_script_on_which_no_rule_could_act_is_told_so(how: str, folder: Folder) -> None:
    done = folder.run(UNSEEN[how])
    assert done.code == 0, done.lines
    assert [line.startswith(IDLE) for line in done.lines].count(True) == 1, done.lines
    assert done.lines[-1].startswith(IDLE)
