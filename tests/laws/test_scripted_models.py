"""Models that `torch.jit` runs, whole or in part: rules act on their parameters, and say where no hook is called."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from models import data, same
from small import attach, fields_of, linears, rule_file
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import BindError, Diagnosis, GradSurgeonWarning, NonFiniteGradientError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.:FutureWarning"),  # since torch 2.14
]

HALF = 0.5


class Inner(nn.Module):
    """Takes the root of what a norm makes; PyTorch cannot replay a traced BatchNorm."""

    def __init__(self, norm: nn.Module, shift: float = 9.0) -> None:
        super().__init__()
        self.shift = shift
        self.lin = nn.Linear(4, 4)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.sqrt(self.norm(self.lin(x)) + self.shift)
        return out


class Whole(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(self.first(x)))
        return out


def scripted(module: nn.Module) -> Any:
    return torch.jit.script(module)


def traced(module: nn.Module) -> Any:
    module.eval()  # the batch that it is traced on moves no statistics
    made = torch.jit.trace(module, torch.zeros(3, 4))
    made.train()
    return made


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        torch.manual_seed(0)
        return make()

    return made


def norm() -> nn.Module:
    return nn.BatchNorm1d(4)


MODELS: dict[str, Callable[[], Any]] = {
    "part scripted": seeded(lambda: Whole(scripted(Inner(norm())))),
    "part traced": seeded(lambda: Whole(traced(Inner(norm())))),
    "all scripted": seeded(lambda: scripted(Whole(Inner(norm())))),
    "all traced": seeded(lambda: traced(Whole(Inner(norm())))),
    "traced in scripted": seeded(lambda: scripted(Whole(traced(Inner(norm()))))),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


ON_PARAMS = rule_file(
    {"action": "scale", "params": "inner.*", "factor": HALF},
    {"action": "zero", "params": "first.bias"},
    {"action": "norm-log", "params": "*"},
    {"action": "nan-trap", "params": "*", "then": "skip-step"},
)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    edit: Callable[[], None] = lambda: None,
) -> None:
    for step in range(3):
        optimizer.zero_grad()
        model(data(step, 5, 4)).square().mean().backward()
        edit()
        optimizer.step()


def equal(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return same([*one], [*other])


def trace(model: nn.Module) -> list[object]:
    """Everything that rules could leave on a model."""
    found: list[object] = [
        (name, id(param), param._backward_hooks, param._post_accumulate_grad_hooks, vars(param))
        for name, param in model.named_parameters()
    ]
    for name, module in model.named_modules():
        tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        found.append((name, id(module), [dict(table) for table in tables], sorted(vars(module))))
    return found


@every_model
def test_training_equals_a_loop_by_hand_and_leaves_nothing(make: Callable[[], Any]) -> None:
    by_hand, model = make(), make()
    params = dict(by_hand.named_parameters())

    def edit() -> None:
        for name, param in params.items():
            if name.startswith("inner."):
                param.grad.mul_(HALF)
        params["first.bias"].grad.zero_()

    train(by_hand, sgd(by_hand), edit)
    optimizer = sgd(model)
    _ = model.forward  # a scripted module keeps it once it was asked for
    before = trace(model)
    with gradsurgeon.apply(model, ON_PARAMS, optimizer=optimizer) as session:
        assert trace(model) != before
        train(model, optimizer)
        assert [one.fired for one in session.status().values()] == [12, 3, 24, 3]
    assert equal(model.state_dict().values(), by_hand.state_dict().values())
    assert trace(model) == before


@every_model
def test_copies_and_files_are_as_without_rules(make: Callable[[], Any]) -> None:
    model, plain = make(), make()
    with gradsurgeon.apply(model, ON_PARAMS, optimizer=sgd(model)):
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        file = io.BytesIO()
        torch.save(state, file)
        with (
            torch.no_grad()
        ):  # a copy of a scripted module has a graph otherwise, with rules and without
            twin = copy.deepcopy(model)
        weights = [param.requires_grad_() for param in twin.parameters()]
        by_twin = torch.autograd.grad(twin(data(0, 5, 4)).square().mean(), weights)
        by_plain = torch.autograd.grad(plain(data(0, 5, 4)).square().mean(), plain.parameters())
        assert equal(by_twin, by_plain)
        assert not any(param._backward_hooks for param in weights)
    file.seek(0)
    assert equal(torch.load(file).values(), make().state_dict().values())


def test_a_part_goes_on_without_the_model_and_the_session_ends_with_it() -> None:
    inner = scripted(nn.Linear(4, 2))
    model = nn.Sequential(inner)
    session = attach(model, {"action": "scale", "params": "*", "factor": HALF})
    del model
    gc.collect()
    with pytest.warns(GradSurgeonWarning, match="parts of it live on"):
        train(inner, sgd(inner))
    inner.zero_grad()
    inner(torch.ones(1, 4)).sum().backward()
    weight = inner.weight
    assert torch.equal(weight.grad, torch.full((2, 4), HALF))
    assert "removed" not in str(session)
    del inner
    gc.collect()
    assert "removed" in str(session)
    assert not weight._backward_hooks
    assert not weight._post_accumulate_grad_hooks


# --- rules on modules ----------------------------------------------------------------------------------

UNSEEN: list[tuple[str, str | list[str], str]] = [
    ("part scripted", "inner", "1 of the matched modules (inner)"),
    ("part scripted", "*", "3 of the matched modules (inner, inner.lin, inner.norm)"),
    ("part traced", ["inner", "inner.lin"], "2 of the matched modules (inner, inner.lin)"),
    ("all scripted", ".", "1 of the matched modules (.)"),
    ("all traced", "last", "1 of the matched modules (last)"),
    ("traced in scripted", "inner", "1 of the matched modules (inner)"),
]


@pytest.mark.parametrize("tensor", ["input", "output", "output.grad"])
@pytest.mark.parametrize(("name", "modules", "named"), UNSEEN)
def test_a_rule_is_refused_where_no_hook_is_called(
    name: str, modules: str | list[str], named: str, tensor: str
) -> None:
    model = MODELS[name]()
    before = trace(model)
    with pytest.raises(BindError) as caught:
        attach(
            model,
            {"action": "scale", "modules": modules, "tensor": tensor, "factor": HALF},
        )
    text = str(caught.value)
    assert f"torch.jit runs {named}, and calls no hook there: name the module around them" in text
    assert "rules on parameters (`params`) do act there" in text
    assert trace(model) == before


def test_a_module_that_gives_way_to_a_scripted_one_is_told_of_once() -> None:
    model = linears(4, 4, 2)
    entry = {"action": "scale", "modules": "1", "tensor": "output", "factor": HALF}
    with attach(model, entry, optimizer=sgd(model)) as session:
        train(model, sgd(model))
        model[1] = scripted(nn.Linear(4, 2))
        with pytest.warns(
            GradSurgeonWarning, match="module 1 is gone from the model, or torch.jit"
        ) as warned:
            for _ in range(4):
                train(model, sgd(model))
        lost = fields_of(session, "name", kind="hook-lost")
    assert len(warned) == 1
    assert lost == ["1"]


# --- where a NaN was born ------------------------------------------------------------------------------


def diagnosed(model: nn.Module) -> Diagnosis:
    """Return the diagnosis of a step whose input makes the root of something negative."""
    optimizer = sgd(model)
    with attach(
        model,
        {"action": "nan-trap", "params": "*", "then": "raise"},
        optimizer=optimizer,
    ):
        out = model(data(0, 5, 4) * torch.tensor([[1.0], [1.0], [1.0], [1.0], [1e3]]))
        out.square().mean().backward()
        before = [buffer.clone() for buffer in model.buffers()]
        with pytest.raises(NonFiniteGradientError) as caught:
            optimizer.step()
        assert equal(model.buffers(), before)
    diagnosis = caught.value.diagnosis
    assert isinstance(diagnosis, Diagnosis)
    return diagnosis


BORN: dict[str, tuple[Callable[[], Any], str, str]] = {
    "scripted": (
        lambda: Whole(scripted(Inner(norm(), shift=1.2))),
        "inner",
        "RecursiveScriptModule",
    ),
    "traced": (lambda: Whole(traced(Inner(nn.Identity()))), "inner", "TopLevelTracedModule"),
    "all traced": (lambda: traced(Whole(Inner(nn.Identity()))), ".", "TopLevelTracedModule"),
}


@pytest.mark.parametrize(("make", "module", "kind"), BORN.values(), ids=BORN)
def test_a_birth_is_found_in_what_torch_jit_runs(
    make: Callable[[], Any], module: str, kind: str
) -> None:
    found = diagnosed(seeded(make)())
    assert (found.certainty, found.module, found.module_type, found.operation) == (
        "reproduced",
        module,
        kind,
        "aten.sqrt",
    )


def test_nobody_is_blamed_where_torch_jit_runs_the_model() -> None:
    found = diagnosed(seeded(lambda: scripted(Whole(Inner(nn.Identity()))))())
    assert found.certainty == "not reproduced"
    (reason,) = found.reasons
    assert "torch.jit.script runs it" in reason


def test_losses_are_combined_over_scripted_modules_and_their_statistics_move_once() -> None:
    entry = {"action": "combine", "method": "pcgrad", "losses": ["a", "b"], "params": "*"}
    states = []
    for make in (seeded(lambda: Whole(Inner(norm()))), MODELS["part scripted"]):
        model = make()
        optimizer = sgd(model)
        with attach(model, entry, optimizer=optimizer):
            for step in range(3):
                a, b = model(data(step, 5, 4)).unbind(1)
                optimizer.zero_grad()
                gradsurgeon.backward({"a": a.square().mean(), "b": (b - 1).square().mean()})
                optimizer.step()
        states.append(model.state_dict())
    eager, compiled = states
    torch.testing.assert_close(list(compiled.values()), list(eager.values()))
