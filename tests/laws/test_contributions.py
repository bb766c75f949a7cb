"""Rules at `backward` act on each gradient as it comes, as hooks that are written by hand."""

from __future__ import annotations

import pytest
import torch
from small import attach, rule_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import gradsurgeon

BOUND = {"id": "bound", "action": "clamp", "params": "*", "at": "backward", "min": -0.1, "max": 0.1}
LOG = {"id": "log", "action": "norm-log", "params": "*", "at": "backward", "stats": ["l2", "linf"]}
KEEP = {"id": "keep", "action": "capture", "params": "*", "at": "backward"}
RULES = rule_file(BOUND, LOG, KEEP)


class Net(nn.Module):
    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.reentrant = reentrant

    def inside(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        if not self.reentrant:
            return self.inside(x)
        # Every parameter gets a part from within the region, and one from outside of it.
        inside: Tensor = checkpoint(self.inside, x, use_reentrant=True)
        return self.inside(inside)


def loss_of(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    loss: Tensor = 50 * model(torch.randn(5, 6, requires_grad=True)).square().sum()
    return loss


def clamped_by_hand(model: nn.Module) -> list[RemovableHandle]:
    return [param.register_hook(lambda grad: grad.clamp(-0.1, 0.1)) for param in model.parameters()]


def grads_of(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.filterwarnings("ignore:rule .* gets parts of a gradient")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_records_and_copies_are_those_of_hooks(reentrant: bool) -> None:
    ours, theirs = Net(reentrant=reentrant), Net(reentrant=reentrant)
    clamped_by_hand(theirs)
    loss_of(theirs).backward()
    with gradsurgeon.apply(ours, RULES, optimizer=[]) as session:
        loss_of(ours).backward()
        session.tick()
        status, kept = session.status(), session.captured("keep")
        norms = {
            name: dict(session.history(name, rule="log")) for name, _ in ours.named_parameters()
        }
    assert [*map(torch.equal, grads_of(ours), grads_of(theirs))] == [True] * 8
    parts = 2 if reentrant else 1
    assert {rule: status[rule].fired for rule in status} == dict.fromkeys(status, 8 * parts)
    if not reentrant:
        for name, param in ours.named_parameters():
            assert param.grad is not None
            assert torch.equal(kept[name, 0, 0], param.grad)
            assert norms[name] == {0: pytest.approx(param.grad.norm().item(), rel=1e-6)}


def test_a_hook_of_the_script_that_comes_later_sees_what_the_rule_made() -> None:
    model, seen = Net(), dict[str, Tensor]()
    with gradsurgeon.apply(model, RULES, optimizer=[]):
        for name, param in model.named_parameters():
            if name.endswith("weight"):
                param.register_hook(lambda grad, name=name: seen.update({name: grad.clone()}))
            else:
                param.register_post_accumulate_grad_hook(
                    lambda param, name=name: seen.update({name: param.grad.clone()})
                )
        loss_of(model).backward()
    assert {name: grad.abs().max().item() < 0.101 for name, grad in seen.items()} == {
        name: True for name, _ in model.named_parameters()
    }


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_that_has_a_graph_keeps_it() -> None:
    ours, theirs = Net(), Net()
    handles = clamped_by_hand(theirs)
    second = []
    with attach(ours, BOUND, optimizer=[]):
        for model in (theirs, ours):
            loss_of(model).backward(create_graph=True)
            grads = grads_of(model)
            assert all(grad.requires_grad for grad in grads)
            # Rules leave the results of `torch.autograd.grad` alone.
            for handle in handles:
                handle.remove()
            total = sum((grad.square().sum() for grad in grads), torch.zeros(()))
            second.append(torch.autograd.grad(total, list(model.parameters()), allow_unused=True))
    torch.testing.assert_close(*second, rtol=0.0, atol=0.0)
