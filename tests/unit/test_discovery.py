"""Which module the launcher takes for the model of an optimizer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from small import linears
from torch import Tensor, nn

from gradsurgeon.integrations.launcher.model_roots import roots_of


class Holder(nn.Module):
    """Holds modules by the names that it is given."""

    def __init__(self, **modules: nn.Module | None) -> None:
        super().__init__()
        for name, module in modules.items():
            self.register_module(name, module)


def net(width: int = 3) -> nn.Module:
    return linears(width, 4, 1)


def frozen(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).requires_grad_(False)


def test_tensors_that_no_module_can_hold_are_not_looked_for() -> None:
    collections: list[str] = []

    def count(phase: str, _: object) -> None:
        collections.append(phase)

    gc.callbacks.append(count)
    try:
        # Some scripts build an optimizer of an input in every step.
        assert roots_of([torch.zeros(3, requires_grad=True)]) == []
        assert not collections
        model = net()
        assert roots_of([torch.zeros(3, requires_grad=True), *model.parameters()]) == [model]
        assert collections
    finally:
        gc.callbacks.remove(count)


def test_what_keeps_a_model_beside_frozen_copies_is_passed_over() -> None:
    model = net()
    held = [
        Holder(online=model, ema=frozen(model), none=None),
        Holder(online=model, fast=frozen(model), slow=frozen(model).double(), loss=nn.MSELoss()),
    ]
    assert roots_of(list(model.parameters())) == [model]
    # Whoever trains the copy as well trains the whole.
    assert roots_of(list(held[0].parameters())) == [held[0]]


def test_a_wrapper_around_the_model_stays_above_it() -> None:
    model = net()
    wrapper = Holder(module=model)
    keeper = Holder(online=model, ema=frozen(model))
    outer = Holder(online=wrapper, ema=frozen(wrapper))
    assert roots_of(list(model.parameters())) == [wrapper]
    del keeper, outer


class Called(Holder):
    """Holds modules, and is called itself."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


def test_an_average_that_is_called_itself_is_passed_over() -> None:
    model = net()
    keeper = Called(online=model, ema=frozen(model))
    assert roots_of(list(model.parameters())) == [model]
    del keeper


WHOLES = {
    "a frozen layer of the same shape": lambda model: Called(fc1=frozen(net()), fc2=model),
    "a frozen teacher of another shape": lambda model: Holder(
        student=model, teacher=frozen(net(5))
    ),
    "a critic that is trained": lambda model: Holder(actor=model, critic=net()),
    "a target that another optimizer may own": lambda model: Holder(
        online=model, target=copy.deepcopy(model)
    ),
    "frozen layers of the same shape": lambda model: nn.ModuleList([frozen(model), model]),
    "frozen layers inside": lambda model: Holder(
        trunk=Holder(a=frozen(model), b=model), head=frozen(nn.Linear(1, 1))
    ),
    "a copy and something else": lambda model: Holder(
        online=model, ema=frozen(model), head=frozen(nn.Linear(1, 1))
    ),
}


@pytest.mark.parametrize("name", WHOLES)
def test_the_outermost_module_is_the_model(name: str) -> None:
    model = net()
    whole = WHOLES[name](model)
    params: list[Tensor] = list(model.parameters())
    assert roots_of(params) == [whole]


class NetWithLoss(Holder):
    """Computes its loss itself."""


class ContrastiveLoss(Holder):
    """Holds the model that it judges."""


def test_a_model_that_computes_its_loss_is_the_model_and_a_loss_is_none() -> None:
    model = net()
    loss = ContrastiveLoss(model=model)
    assert roots_of(list(model.parameters())) == [model]
    whole = NetWithLoss(net=model)
    assert roots_of(list(model.parameters())) == [whole]
    del loss


def compiled(model: nn.Module) -> nn.Module:
    part = torch.compile(model, backend="eager")
    assert isinstance(part, nn.Module)
    return part


PARTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "probabilities": lambda model: nn.Sequential(model, nn.Softmax(1)),
    "a compiled part": compiled,
}


@pytest.mark.parametrize("name", PARTS)
def test_the_model_of_the_script_comes_before_what_torch_wraps_around_a_part(name: str) -> None:
    model = net()
    params: list[Tensor] = list(model.parameters())
    early = PARTS[name](model)
    # Without a model of the script around it, the part is what is trained.
    assert roots_of(params) == [early]
    # The frozen layer makes the whole larger.
    whole = Holder(embed=frozen(nn.Linear(2, 2)), net=model)
    late = PARTS[name](model)
    assert roots_of(params) == [whole]
    # The whole is not trained if more is trained elsewhere.
    larger = nn.Sequential(model, nn.Linear(1, 1))
    params += larger[1].parameters()
    assert roots_of(params) == [larger]
    del late
