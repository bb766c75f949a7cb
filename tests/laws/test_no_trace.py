"""P2 and P7: nothing stays behind, nothing half-applied, and copies carry nothing."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from laws.traces import trace
from models import CASES, same, train
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import BindError, GradSurgeonError

EVERYTHING = """
version: 1
rules:
  - {id: scaled, action: scale, params: "*", factor: 0.5}
  - {id: final, action: clamp, params: "*", at: step, min: -0.5, max: 0.5}
  - {id: contributions, action: norm-log, at: backward, params: "*"}
  - {id: norms, action: norm-log, params: "*"}
  - {id: outputs, action: norm-log, modules: ["*", "."], tensor: output.grad}
  - {id: inputs, action: norm-log, modules: ["*", "."], tensor: input}
  - {id: trap, action: nan-trap, params: "*", then: skip-step}
  - {id: spikes, action: spike-trap, params: "*", above: {sigmas: 4, warmup: 2}}
"""
REAL = EVERYTHING.replace("  - {id: final, action: clamp,", "  # ")


@pytest.mark.parametrize("name", CASES)
def test_apply_and_remove_leave_no_trace(name: str) -> None:
    case = CASES[name]
    model = case.make()
    optimizer = case.optimizer(model)
    before = trace(model, optimizer)
    keys = list(model.state_dict())
    session = gradsurgeon.apply(model, REAL if case.complex else EVERYTHING, optimizer=optimizer)
    assert trace(model, optimizer) != before
    case.backward(model, 0)
    optimizer.step()
    session.remove()
    session.remove()
    assert trace(model, optimizer) == before
    assert list(model.state_dict()) == keys


def test_remove_by_model_and_by_block() -> None:
    model = CASES["mlp"].make()
    optimizer = CASES["mlp"].optimizer(model)
    before = trace(model, optimizer)
    gradsurgeon.apply(model, EVERYTHING, optimizer=optimizer)
    gradsurgeon.remove(model)
    assert trace(model, optimizer) == before
    gradsurgeon.remove(model)
    with (
        pytest.raises(ZeroDivisionError),
        gradsurgeon.apply(model, EVERYTHING, optimizer=optimizer),
    ):
        raise ZeroDivisionError
    assert trace(model, optimizer) == before


@pytest.mark.parametrize(
    "broken",
    [
        EVERYTHING.replace("scale,", "scael,"),
        EVERYTHING.replace(
            'id: trap, action: nan-trap, params: "*"', 'id: t, action: zero, params: "x"'
        ),
        EVERYTHING.replace("then: skip-step", "expect: {params: 3}"),
    ],
    ids=["unknown action", "no match", "expectation"],
)
def test_a_failing_apply_changes_nothing(broken: str) -> None:
    model = CASES["frozen"].make()
    optimizer = CASES["frozen"].optimizer(model)
    before = trace(model, optimizer)
    with pytest.raises(GradSurgeonError, match=r"^[12] problem"):
        gradsurgeon.apply(model, broken, optimizer=optimizer)
    assert trace(model, optimizer) == before


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_hook_that_torch_refuses_takes_the_others_down_with_it() -> None:
    model = CASES["mlp"].make()
    optimizer = CASES["mlp"].optimizer(model)
    before = trace(model, optimizer)
    # torch refuses hooks on tensors that are not leaves; a module can be given one by force.
    model.norm._parameters["made"] = (torch.ones(3, requires_grad=True) * 2).requires_grad_(True)
    try:
        with pytest.raises(BindError, match="leaf"):
            gradsurgeon.apply(model, EVERYTHING, optimizer=optimizer)
    finally:
        del model.norm._parameters["made"]
    assert trace(model, optimizer) == before


def test_parameters_that_can_never_have_a_gradient_are_borne() -> None:
    model = CASES["mlp"].make()
    with torch.inference_mode():
        model.register_parameter("seen", nn.Parameter(torch.ones(3), requires_grad=False))
    model.register_parameter("ids", nn.Parameter(torch.arange(3), requires_grad=False))
    with gradsurgeon.apply(model, EVERYTHING) as session:
        train(CASES["mlp"], model, steps=1)
        assert session.status()["norms"].matched == 8
        assert session.status()["norms"].fired == 6


def test_a_second_apply_needs_replace() -> None:
    model = CASES["mlp"].make()
    first = gradsurgeon.apply(model, EVERYTHING)
    with pytest.raises(GradSurgeonError, match=r"already applied .* replace=True"):
        gradsurgeon.apply(model, EVERYTHING)
    second = gradsurgeon.apply(model, EVERYTHING, replace=True)
    assert first is not second
    assert len(model.fc1.weight._backward_hooks) == 1
    with pytest.raises(BindError, match="no parameter of the model matches"):
        gradsurgeon.apply(model, EVERYTHING.replace('"*"', '"x"'), replace=True)
    train(CASES["mlp"], model, steps=1)
    assert second.status()["norms"].fired == 6


def test_copies_of_an_optimizer_carry_no_hooks() -> None:
    model = CASES["mlp"].make()
    optimizer = CASES["mlp"].optimizer(model)
    with gradsurgeon.apply(model, EVERYTHING, optimizer=optimizer):
        assert optimizer._optimizer_step_pre_hooks
        for one in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert not one._optimizer_step_pre_hooks
            assert not one._optimizer_step_post_hooks
        assert b"gradsurgeon" not in pickle.dumps(optimizer)


# -------------------------------------------------------------------------------------------------
# P1: with observing rules only, training is bit-identical to training without gradsurgeon.
# -------------------------------------------------------------------------------------------------


OBSERVING = """
version: 1
rules:
  - {id: norms, action: norm-log, params: "*"}
  - {id: contributions, action: norm-log, at: backward, params: "*", stats: [l1, std, zeros]}
  - {id: final, action: norm-log, at: step, params: "*", stats: [linf, nonfinite]}
  - {id: trap, action: nan-trap, params: "*"}
  - {id: spikes, action: spike-trap, params: "*", above: {sigmas: 4, warmup: 2}, then: warn}
  - {id: weights, action: norm-log, params: "*", tensor: value}
  - {id: updates, action: norm-log, params: "*", tensor: update}
"""


def wide(grad: Tensor) -> Tensor:
    dense = grad.to_dense() if grad.is_sparse else grad
    return dense.to(torch.complex128 if grad.is_complex() else torch.float64)


@pytest.mark.filterwarnings("ignore:step 6, rule spikes")  # the batch differs from those before
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_without_and_true_norms(name: str) -> None:
    case = CASES[name]
    plain = train(case, case.make())
    model = case.make()
    with gradsurgeon.apply(model, OBSERVING) as session:
        observed = train(case, model)
        optimizer = case.optimizer(model)
        case.backward(model, 0)
        wanted = {
            key: wide(param.grad).norm().item()
            for key, param in model.named_parameters()
            if param.grad is not None
        }
        optimizer.step()
    assert same(observed, plain)
    assert all(status.fired > 0 for status in session.status().values())
    assert wanted
    for key, norm in wanted.items():
        assert session.latest(key, rule="norms") == pytest.approx(norm, rel=1e-5, abs=1e-30)
