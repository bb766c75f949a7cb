"""A rule does what the same line of PyTorch, written by hand, does: bit for bit, on every model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import CASES, Case, same
from pairs import singly
from ranks import Json
from small import equal, rule_file, sgd, tanh_net
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import BindError

Edit = Callable[[Tensor], Tensor]


def on_values(edit: Edit) -> Edit:
    def apply(grad: Tensor) -> Tensor:
        if grad.layout == torch.strided:
            return edit(grad)
        whole = grad.coalesce()
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            return torch.sparse_coo_tensor(whole.indices(), edit(whole.values()), whole.shape)

    return apply


EDITS: dict[str, tuple[dict[str, object], Edit]] = {
    "clamp": (
        {"action": "clamp", "min": -0.01, "max": 0.02},
        lambda grad: grad.clamp(-0.01, 0.02),
    ),
    "clamp-one-side": ({"action": "clamp", "max": 0.001}, lambda grad: grad.clamp(max=0.001)),
    "scale": ({"action": "scale", "factor": -0.5}, lambda grad: grad * -0.5),
    "zero": ({"action": "zero"}, torch.zeros_like),
}


def run_by_hand(case: Case, edit: Edit, at: str) -> list[Tensor]:
    model = case.make()
    params = list(model.parameters())
    if at == "backward":
        for param in params:
            frozen = not param.requires_grad
            param.requires_grad_(True)
            param.register_hook(on_values(edit))
            param.requires_grad_(not frozen)

    def at_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with torch.no_grad():
            for param in params:
                if param.grad is not None and at == "step":
                    param.grad = on_values(edit)(param.grad)

    return run(case, model, at_step)


def run(
    case: Case, model: nn.Module, at_step: Callable[..., None] | None = None, steps: int = 6
) -> list[Tensor]:
    torch.manual_seed(11)
    optimizer = case.optimizer(model)
    if at_step is not None:
        optimizer.register_step_pre_hook(at_step)
    for step in range(steps):
        if step == 3:
            model.requires_grad_(True)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        case.backward(model, step)
        optimizer.step()
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def rules(options: dict[str, object], at: str, pattern: str = "*") -> dict[str, object]:
    return rule_file({"id": "it", "params": pattern, "at": at, **options})


# The case with two passes per step is warned about, as it should be.
BOUNDS = "ignore:rule it. bounds the contribution:gradsurgeon.GradSurgeonWarning"


COMPLEX = [name for name, case in CASES.items() if case.complex]
REAL = [name for name in CASES if name not in COMPLEX]


@pytest.mark.cell("one process", "backward", "step")
@pytest.mark.filterwarnings(BOUNDS)
@singly(name=REAL, edit=EDITS, at=["backward", "step"])
def test_same_bits_as_by_hand(name: str, edit: str, at: str) -> None:
    as_by_hand(CASES[name], edit, at)


@pytest.mark.filterwarnings(BOUNDS)
@pytest.mark.parametrize("at", ["backward", "step"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", COMPLEX)
def test_same_bits_as_by_hand_on_complex_numbers(name: str, edit: str, at: str) -> None:
    case, (options, _) = CASES[name], EDITS[edit]
    if edit.startswith("clamp"):
        with pytest.raises(BindError, match=r"rule it: complex numbers have no order"):
            gradsurgeon.apply(case.make(), rules(options, at))
    else:
        as_by_hand(case, edit, at)


def as_by_hand(case: Case, edit: str, at: str) -> None:
    options, by_hand = EDITS[edit]
    wanted = run_by_hand(case, by_hand, at)
    model = case.make()
    with gradsurgeon.apply(model, rules(options, at)) as session:
        got = run(case, model)
    assert session.status()["it"].fired > 0
    assert same(got, wanted)
    # The rule acts: without it the run ends elsewhere.
    assert not same(got, run(case, case.make()))


@pytest.mark.filterwarnings(BOUNDS)
@singly(name=REAL, edit=EDITS, at=["backward", "step"])
def test_observe_mode_changes_nothing_and_counts_what_would_change(
    name: str, edit: str, at: str
) -> None:
    case, (options, _) = CASES[name], EDITS[edit]
    plain = run(case, case.make(), steps=1)
    acting, observing = case.make(), case.make()
    with gradsurgeon.apply(acting, rules(options, at)) as act:
        run(case, acting, steps=1)
    with gradsurgeon.apply(observing, rules(options, at), mode="observe") as observe:
        got = run(case, observing, steps=1)
    assert same(got, plain)
    observed = observe.status()["it"]
    assert observed.changed is not None
    assert observed.changed > 0
    if act.status()["it"].changed is None:
        observed = replace(observed, altered=None)
    assert observed == act.status()["it"]


def test_an_edit_leaves_the_other_side_of_a_sum_alone() -> None:
    # Both parameters are handed the same gradient tensor.
    model = Two()
    with gradsurgeon.apply(model, rules({"action": "zero"}, "backward", "a")):
        (model.a + model.b).backward()
    assert equal([model.a.grad, model.b.grad], [torch.zeros(1), torch.ones(1)])


@pytest.mark.parametrize("at", ["backward", "step"])
def test_the_gradient_that_the_script_hands_in_is_not_written(at: str) -> None:
    model = nn.Linear(3, 1, bias=False)
    handed = torch.ones(3)
    optimizer = sgd(model)
    with gradsurgeon.apply(model, rules({"action": "scale", "factor": 5.0}, at)):
        model.weight.view(3).backward(handed)
        optimizer.step()
    assert handed.tolist() == [1.0, 1.0, 1.0]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[5.0, 5.0, 5.0]]


class SecondOrder(torch.optim.SGD):
    """Differentiates the gradients that it is given, as AdaHessian and Sophia do."""

    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        grads = [param.grad for param in params]
        products = torch.autograd.grad(grads, params, [torch.ones_like(param) for param in params])
        with torch.no_grad():
            for param, grad, product in zip(params, grads, products, strict=True):
                param.sub_(0.1 * grad / (1 + product.abs()))


SECOND_ORDER: dict[str, tuple[dict[str, object], Callable[[list[Tensor]], object]]] = {
    "clamp that changes nothing": (
        {"action": "clamp", "min": -100.0, "max": 100.0},
        lambda grads: grads,
    ),
    "clamp": (
        {"action": "clamp", "min": -0.01, "max": 0.01},
        lambda grads: [grad.clamp_(-0.01, 0.01) for grad in grads],
    ),
    "scale": (
        {"action": "scale", "factor": 0.5},
        lambda grads: [grad.mul_(0.5) for grad in grads],
    ),
    "zero": ({"action": "zero"}, lambda grads: [grad.zero_() for grad in grads]),
    "clip-norm": (
        {"action": "clip-norm", "max_norm": 0.125, "per": "parameter"},
        lambda grads: [grad.mul_((0.125 / (grad.norm() + 1e-6)).clamp(max=1.0)) for grad in grads],
    ),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("name", SECOND_ORDER)
@pytest.mark.parametrize("passes", [1, 2], ids=["one pass", "accumulated"])
def test_an_optimizer_of_second_order_gets_the_hessian_that_an_edit_by_hand_leaves(
    name: str, passes: int
) -> None:
    options, edit = SECOND_ORDER[name]

    def train(*, by_rule: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = tanh_net(3, 4, 1)
        optimizer, x = SecondOrder(model.parameters(), lr=0.1), torch.randn(2, 3)
        if by_rule:
            gradsurgeon.apply(model, rules(options, "step"))
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(passes):
                model(x).square().sum().backward(create_graph=True)
            if not by_rule:
                with torch.no_grad():
                    edit([param.grad for param in model.parameters() if param.grad is not None])
            optimizer.step()
        if by_rule:
            gradsurgeon.remove(model)
        model.zero_grad()
        return [param.detach() for param in model.parameters()]

    for expected, got in zip(train(by_rule=False), train(by_rule=True), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0.0)


@pytest.mark.filterwarnings("ignore:weight got a gradient that did not pass")
def test_half_precision_bounds_beyond_its_range() -> None:
    grad = torch.tensor([1.0, 65504.0, math.inf, -math.inf]).half()
    found = edited({"action": "clamp", "min": -1e6, "max": 1e6}, grad)
    assert found.tolist() == [1.0, 65504.0, 65504.0, -65504.0]


def test_a_sparse_gradient_that_would_become_dense_is_refused() -> None:
    case = CASES["sparse"]
    options: dict[str, object] = {"action": "clamp", "min": 0.5}
    with pytest.raises(BindError, match=r"1 parameters are sparse \(emb.weight\)"):
        gradsurgeon.apply(case.make(), rules(options, "step"))


# -------------------------------------------------------------------------------------------------
# Half precision is multiplied in float32, wherever a factor acts.
# -------------------------------------------------------------------------------------------------


def edited(rule: dict[str, object], grad: Tensor) -> Tensor:
    """Return a gradient as a rule at `step` leaves it."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(grad))
    model.weight.grad = grad.clone()
    optimizer = sgd(model, 0.0)
    rules = rule_file({"id": "rule", "params": "*", "at": "step", **rule})
    with gradsurgeon.apply(model, rules):
        optimizer.step()
    assert model.weight.grad is not None
    return model.weight.grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
# float16 can hold neither 1e5 nor 1e-9; 1.003 is 1 to bfloat16, and 1.0004 to both of them.
@pytest.mark.parametrize("factor", [1e5, 1e-9, 1.003, 1.0004, 0.30012345])
def test_scale_rounds_what_comes_out_and_not_the_factor(dtype: torch.dtype, factor: float) -> None:
    grad = torch.tensor([6e-5, 1.9921875, 0.7, 60000.0], dtype=dtype)
    expected = (grad.float() * factor).to(dtype)
    assert torch.equal(edited({"action": "scale", "factor": factor}, grad), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_clip_norm_rounds_what_comes_out_and_not_the_factor(dtype: torch.dtype) -> None:
    grad = torch.linspace(0.5, 7.0, 64, dtype=dtype)
    factor = 0.05 / grad.float().norm()
    expected = (grad.float() * factor).to(dtype)
    assert torch.equal(
        edited({"action": "clip-norm", "per": "parameter", "max_norm": 0.05}, grad), expected
    )


def test_a_float32_gradient_counts_as_changed_by_its_own_dtype() -> None:
    # In float64 the bound is smaller than the element; rounded to float32 it is the element.
    model = nn.Module()
    model.narrow = nn.Parameter(torch.zeros(2))
    model.wide = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    bound = {"id": "b", "action": "clamp", "params": "*", "at": "step", "max": 0.1}
    document = rule_file(bound)
    with gradsurgeon.apply(model, document, mode="observe") as session:
        optimizer = sgd(model)
        (model.narrow.sum() * 0.1 + model.wide.sum()).backward()
        optimizer.step()
        assert session.status()["b"].changed == 0.5


LARGE = 5000  # more elements than are looked at together with those of other gradients
CLAMP: Json = {"action": "clamp", "min": -1.0, "max": 1.0}


@pytest.mark.parametrize("rule", [CLAMP, {"action": "scale", "factor": 0.5}, {"action": "zero"}])
@pytest.mark.parametrize("last", [0.0, 0.5, 2.0, math.nan, math.inf])
@pytest.mark.parametrize("sizes", [(1, 64), (LARGE, 64), (LARGE, 2**18), (64, LARGE, 0, 1)])
def test_observed_gradients_count_as_changed_by_any_of_their_elements(
    rule: Json, last: float, sizes: tuple[int, ...]
) -> None:
    # Only the last element of the first gradient can change.
    grads = [torch.zeros(size) for size in sizes]
    grads[0][-1] = last
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    optimizer = sgd(model, 0.0)
    document = rule_file({"id": "r", "params": "*", "at": "step", **rule})
    counted = {}
    for mode in ("observe", "act"):
        for param, grad in zip(model, grads, strict=True):
            param.grad = grad.clone()
        with gradsurgeon.apply(model, document, mode=mode) as session:
            optimizer.step()
            counted[mode] = session.status()["r"].changed
    found = [param.grad for param in model]
    differing = [
        not torch.equal(g.nan_to_num(7.0), f.nan_to_num(7.0))
        for g, f in zip(grads, found, strict=True)
    ]
    assert counted == {"observe": sum(differing) / len(sizes), "act": None}
    assert any(differing) == edits(rule, last)


def edits(rule: Json, last: float) -> bool:
    """Return whether a rule changes a number, by plain arithmetic."""
    if rule["action"] == "clamp":
        return last > 1.0
    # Infinity times 0.5, and NaN times 0.5, are what they were.
    return last != 0.0 if rule["action"] == "zero" else last in (0.5, 2.0)


# -------------------------------------------------------------------------------------------------
# A rule at `step` writes in place, and yet nothing that others hold.
# -------------------------------------------------------------------------------------------------


HALF: Json = {"id": "half", "action": "scale", "factor": 0.5, "at": "step", "params": "a"}


class Two(nn.Module):
    """Two parameters of one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))
        self.b = nn.Parameter(torch.zeros(1))


def steps_with(first: Tensor, second: Tensor, params: str) -> tuple[float, float]:
    """Return how far one step of plain SGD moves two parameters with these gradients."""
    model = Two()
    optimizer = sgd(model, 1.0)
    rules = rule_file({**HALF, "params": params})
    with gradsurgeon.apply(model, rules, optimizer=optimizer):
        (model.a + model.b).sum().backward()
        model.a.grad, model.b.grad = first, second
        optimizer.step()
    return -model.a.item(), -model.b.item()


@pytest.mark.parametrize(
    ("params", "moved"), [("a", (2.0, 4.0)), ("b", (4.0, 2.0)), ("*", (2.0, 2.0))]
)
def test_one_gradient_of_two_parameters(params: str, moved: tuple[float, float]) -> None:
    memory = torch.full((1,), 4.0)
    assert steps_with(memory, memory, params) == moved
    # Two tensors in one memory.
    assert steps_with(memory[:], memory[:], params) == moved
    assert memory.item() == 4.0


def test_a_gradient_that_the_script_holds_a_view_of() -> None:
    buffer = torch.full((2,), 4.0)
    assert steps_with(buffer[:1], buffer[1:], "a") == (2.0, 4.0)
    assert buffer.tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("rule", "written"),
    [
        ({"action": "clip-norm", "per": "parameter", "max_norm": 9.0}, False),
        ({"action": "clip-norm", "max_norm": 9.0, "per": "rule"}, False),
        ({"action": "clip-norm", "per": "parameter", "max_norm": 3.0}, True),
    ],
)
def test_what_a_clip_leaves_alone_is_not_written(rule: Json, *, written: bool) -> None:
    model = Two()
    optimizer = sgd(model, 0.0)
    rules = rule_file({"id": "rule", "params": "*", "at": "step", **rule})
    with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
        (4.0 * (model.a + model.b)).sum().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        versions = [grad._version for grad in grads]
        optimizer.step()
    assert ([grad._version for grad in grads] != versions) is written
    status = session.status()["rule"]
    assert (status.fired, status.changed) == (2, float(written))
