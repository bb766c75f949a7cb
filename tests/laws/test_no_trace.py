"""P2 and P7: nothing stays behind, nothing half-applied, and copies carry nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from models import CASES, same, train
from small import attach, sgd
from torch import nn

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
REAL = EVERYTHING.replace(
    '  - {id: final, action: clamp, params: "*", at: step, min: -0.5, max: 0.5}\n', ""
)


def global_hooks() -> list[object]:
    import sys

    optim = sys.modules["torch.optim.optimizer"]
    module = sys.modules["torch.nn.modules.module"]
    return [
        *optim._global_optimizer_pre_hooks.values(),
        *optim._global_optimizer_post_hooks.values(),
        *module._global_forward_hooks.values(),
        *module._global_forward_pre_hooks.values(),
        *module._global_backward_hooks.values(),
        torch.autograd.graph.log,
        torch.autograd.graph._register_logging_hooks_on_whole_graph,
    ]


def trace(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    """Everything that a tool could leave on a model and its optimizer."""
    found: list[object] = []
    for name, param in model.named_parameters(remove_duplicate=False):
        hooks = (param._backward_hooks, param._post_accumulate_grad_hooks)
        found.append((name, id(param), param.requires_grad, hooks, sorted(vars(param))))
    for name, module in model.named_modules():
        tables = [
            module._forward_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._backward_hooks,
            module._backward_pre_hooks,
        ]
        found.append((name, id(module), [(dict(t), vars(t)) for t in tables], sorted(vars(module))))
    found.append([dict(optimizer._optimizer_step_pre_hooks)])
    found.append([dict(optimizer._optimizer_step_post_hooks)])
    found.append(global_hooks())
    return found


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
    made = (torch.ones(3, requires_grad=True) * 2).requires_grad_(True)
    model.norm._parameters["made"] = made
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
    case = CASES["mlp"]
    model = case.make()
    optimizer = case.optimizer(model)
    with gradsurgeon.apply(model, EVERYTHING, optimizer=optimizer):
        assert optimizer._optimizer_step_pre_hooks
        for one in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert not one._optimizer_step_pre_hooks
            assert not one._optimizer_step_post_hooks
        assert b"gradsurgeon" not in pickle.dumps(optimizer)


def test_a_model_that_is_dropped_is_freed_and_leaves_no_global_hook() -> None:
    before = global_hooks()
    model = CASES["mlp"].make()
    session = gradsurgeon.apply(model, EVERYTHING)
    train(CASES["mlp"], model, steps=2)
    gone = [weakref.ref(model), *(weakref.ref(module) for module in model.modules())]
    weights = [weakref.ref(param) for param in model.parameters()]
    del model
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
    assert [one() for one in weights] == [None] * len(weights)
    assert session._attachment.removed
    assert global_hooks() == before
    # What was measured stays readable.
    assert len(session.history("fc1.weight", rule="norms")) == 2


def test_a_session_that_the_caller_drops_goes_on() -> None:
    model = CASES["mlp"].make()
    optimizer = sgd(model)
    attach(model, {"id": "z", "action": "zero", "params": "*", "at": "step"})
    gc.collect()
    CASES["mlp"].backward(model, 0)
    optimizer.step()
    assert not any(param.grad.any() for param in model.parameters() if param.grad is not None)
    gradsurgeon.remove(model)


def test_removing_keeps_hooks_of_the_script() -> None:
    model = CASES["mlp"].make()
    calls: list[str] = []
    model.fc1.weight.register_hook(lambda _: calls.append("before"))
    session = gradsurgeon.apply(model, EVERYTHING)
    model.fc1.weight.register_hook(lambda _: calls.append("after"))
    session.remove()
    CASES["mlp"].backward(model, 0)
    assert calls == ["before", "after"]


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
"""


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_without(name: str) -> None:
    case = CASES[name]
    plain = train(case, case.make())
    model = case.make()
    with gradsurgeon.apply(model, OBSERVING) as session:
        observed = train(case, model)
    assert same(observed, plain)
    assert all(status.fired > 0 for status in session.status().values())


@pytest.mark.parametrize("name", CASES)
def test_recorded_norms_are_the_true_ones(name: str) -> None:
    case = CASES[name]
    model = case.make()
    optimizer = case.optimizer(model)
    with gradsurgeon.apply(model, OBSERVING) as session:
        case.backward(model, 0)
        wanted = {
            key: torch.linalg.vector_norm(
                (param.grad.to_dense() if param.grad.is_sparse else param.grad).to(
                    torch.complex128 if param.is_complex() else torch.float64
                )
            ).item()
            for key, param in model.named_parameters()
            if param.grad is not None
        }
        optimizer.step()
    assert wanted
    for key, norm in wanted.items():
        assert session.latest(key, rule="norms") == pytest.approx(norm, rel=1e-5, abs=1e-30)
