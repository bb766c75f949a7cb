"""Settings that do nothing: attributes that torch does not read, state dicts that match nothing, copies that are none."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pack_trainings import launched
from small import linears, rule_file, sgd, take_step
from torch import Tensor, nn

import gradsurgeon

RULE = {"id": "structure", "action": "check-structure", "params": "*"}


class Configured(nn.Linear):
    """Keeps a setting of its own by that name."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.requires_grad = False


def attributes_set(model: Any, **attributes: bool) -> Any:
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def frozen_by_attribute() -> Any:
    model: Any = linears(4, 4, 2)
    model[0].requires_grad = False
    return model


def unfrozen_by_attribute() -> Any:
    model: Any = linears(4, 4, 2)
    model[0].requires_grad_(False).requires_grad = True
    return model


def misspelt() -> Any:
    model: Any = linears(4, 4, 2)
    for param in model[0].parameters():
        param.required_grad = False
    return model


def frozen_both_ways() -> Any:
    model = frozen_by_attribute()
    model[0].requires_grad_(False)
    return model


def adapters_inside() -> Any:
    """The layer is frozen but for a part that trains."""
    model = frozen_by_attribute()
    model[0].weight.requires_grad_(False)
    return model


def kept_by_its_class() -> Any:
    return nn.Sequential(Configured(), nn.Linear(4, 2))


def flags_of_others() -> Any:
    model: Any = linears(4, 4, 2)
    attributes_set(model[0].weight, ds_requires_grad=False, requires_sync=False, shared=False)
    return attributes_set(model, training_requires_grad=False)


NOT_READ = "an attribute that torch does not read: the parameters "
TRAIN = "still require gradients, and the optimizer updates them. Call `requires_grad_(False)`"
REST = "stay frozen. Call `requires_grad_(True)`"
ATTRIBUTES: dict[Callable[[], Any], list[tuple[str, str]]] = {
    frozen_by_attribute: [("0", f"sets `requires_grad` of 0 to False, {NOT_READ}{TRAIN}")],
    unfrozen_by_attribute: [("0", f"sets `requires_grad` of 0 to True, {NOT_READ}{REST}")],
    misspelt: [
        ("0.weight", f"sets `required_grad` of 0.weight, 0.bias to False, {NOT_READ}{TRAIN}")
    ],
    frozen_both_ways: [],
    adapters_inside: [],
    kept_by_its_class: [],
    flags_of_others: [],
}


def fit(model: nn.Module, steps: int = 3) -> None:
    optimizer = sgd(model, 0.01)
    for _ in range(steps):
        take_step(optimizer, model(torch.randn(6, 4)).square().mean())


@pytest.mark.parametrize("make", ATTRIBUTES, ids=lambda make: make.__name__)
def test_attribute_that_does_nothing_is_told_once(make: Callable[[], Any]) -> None:
    model = make()
    with gradsurgeon.apply(model, rule_file(RULE)) as session:
        fit(model)
    told = [(event.name, event.message) for event in session.events if event.kind != "fact"]
    expected = ATTRIBUTES[make]
    assert [name for name, _ in told] == [name for name, _ in expected]
    for (_, message), (_, text) in zip(told, expected, strict=True):
        assert text in message


def trained(model: nn.Module, steps: int = 3) -> Sequence[Tensor]:
    fit(model, steps)
    return list(model.parameters())


def wrong_prefix() -> Sequence[Tensor]:
    model = linears(4, 4, 2)
    model.load_state_dict({f"module.{name}": param for name, param in parts()}, strict=False)
    return trained(model)


def dict_in_a_dict() -> Sequence[Tensor]:
    """The part of the model that is loaded is told."""
    model: Any = linears(4, 4, 2)
    model[0].load_state_dict({"model": dict(parts()), "epoch": 3}, strict=False)
    return trained(model)


def network_onto_itself() -> Sequence[Tensor]:
    model = linears(4, 4, 2)
    optimizer = sgd(model, 0.01)
    for step in range(4):
        take_step(optimizer, model(torch.randn(6, 4)).square().mean())
        if step == 1:
            model.load_state_dict(model.state_dict())
    return list(model.parameters())


def best_weights_copied() -> Sequence[Tensor]:
    model = linears(4, 4, 2)
    best = copy.deepcopy(model.state_dict())
    params = trained(model)
    model.load_state_dict(best)
    return [*params, *trained(model)]


def later_load_matches() -> Sequence[Tensor]:
    """A first attempt has the prefix of a wrapper."""
    model = linears(4, 4, 2)
    model.load_state_dict({f"module.{name}": param for name, param in parts()}, strict=False)
    model.load_state_dict(dict(parts()))
    return trained(model)


def parts_of_a_checkpoint() -> Sequence[Tensor]:
    """One of the files of a checkpoint is of another model."""
    model: Any = linears(4, 4, 2)
    model[1].load_state_dict({name: param for name, param in parts() if "1." in name}, strict=False)
    model[1].load_state_dict({"weight": torch.zeros(2, 4)}, strict=False)
    model.load_state_dict({"optimizer": torch.zeros(2)}, strict=False)
    return trained(model)


def nothing_to_load() -> Sequence[Tensor]:
    model: Any = linears(4, 4, 2)
    model.load_state_dict({}, strict=False)
    nn.Tanh().load_state_dict({"scale": torch.ones(1)}, strict=False)
    return trained(model)


def population_from_its_best() -> Sequence[Tensor]:
    """Each member gets the weights of the best one, and so does the best."""
    population = [linears(4, 4, 2) for _ in range(3)]
    for member in population:
        trained(member)
    for member in population:
        member.load_state_dict(population[0].state_dict())
    return trained(population[0])


def onto_itself_before_training() -> Sequence[Tensor]:
    """Nothing is lost yet: a checkpoint was read into the tensors of the state dict."""
    model = linears(4, 4, 2)
    state = model.state_dict()
    for value in state.values():
        value.mul_(0.5)
    model.load_state_dict(state)
    return trained(model)


def parts() -> list[tuple[str, Tensor]]:
    return list(linears(4, 4, 2).state_dict().items())


UNMATCHED = "loaded nothing into {}: no name of the dict is a name of the module"
ITSELF = "copied Sequential onto itself: source and target are one object"
LOADS: dict[Callable[[], Sequence[Tensor]], str] = {
    wrong_prefix: UNMATCHED.format("Sequential"),
    dict_in_a_dict: UNMATCHED.format("0"),
    network_onto_itself: ITSELF,
    best_weights_copied: "",
    later_load_matches: "",
    parts_of_a_checkpoint: "",
    nothing_to_load: "",
    population_from_its_best: "",
    onto_itself_before_training: "",
}


@pytest.fixture(autouse=True)
def no_distributed_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have imported what keeps the check silent."""
    monkeypatch.delitem(sys.modules, "torch.distributed.checkpoint", raising=False)


@pytest.mark.parametrize("train", LOADS, ids=lambda train: train.__name__)
def test_load_that_does_nothing_is_told_once_with_its_line(
    train: Callable[[], Sequence[Tensor]],
) -> None:
    told = [line for line in launched(train).lines if line.startswith("  look: ")]
    if not LOADS[train]:
        assert told == []
        return
    (line,) = told
    assert f"rule debug-structure: `load_state_dict` at {__file__}:" in line
    assert LOADS[train] in line
    assert "other fault" not in line


def test_copy_onto_itself_before_training_is_a_fact() -> None:
    lines = launched(onto_itself_before_training).lines
    place = lines.index("  facts:") + 1
    assert lines[place].startswith(f"    `load_state_dict` at {__file__}:")
    assert ITSELF in lines[place]
