"""A rule does what the same line of PyTorch, written by hand, does: bit for bit, on every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, Case, same
from pairs import pairwise
from torch import Tensor, nn

import gradsurgeon

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
    return {
        "version": 1,
        "rules": [{"id": "it", "params": pattern, "at": at, **options}],
    }


# The case with two passes per step is warned about, as it should be.
BOUNDS = "ignore:rule it. bounds the contribution:gradsurgeon.GradSurgeonWarning"


@pytest.mark.cell("one process", "backward", "step")
@pytest.mark.filterwarnings(BOUNDS)
@pairwise(name=CASES, edit=EDITS, at=["backward", "step"])
def test_same_bits_as_by_hand(name: str, edit: str, at: str) -> None:
    case, (options, by_hand) = CASES[name], EDITS[edit]
    if case.complex and edit.startswith("clamp"):
        with pytest.raises(gradsurgeon.BindError, match=r"rule it: complex numbers have no order"):
            gradsurgeon.apply(case.make(), rules(options, at))
        return
    wanted = run_by_hand(case, by_hand, at)
    model = case.make()
    with gradsurgeon.apply(model, rules(options, at)) as session:
        got = run(case, model)
    assert session.status()["it"].fired > 0
    assert same(got, wanted)
    # The rule bites: without it the run ends elsewhere.
    assert not same(got, run(case, case.make()))


@pytest.mark.filterwarnings(BOUNDS)
@pairwise(name=[n for n in CASES if not CASES[n].complex], edit=EDITS, at=["backward", "step"])
def test_observe_mode_changes_nothing_and_counts_the_same(name: str, edit: str, at: str) -> None:
    case, (options, _) = CASES[name], EDITS[edit]
    plain = run(case, case.make(), steps=1)
    acting, observing = case.make(), case.make()
    with gradsurgeon.apply(acting, rules(options, at)) as act:
        run(case, acting, steps=1)
    with gradsurgeon.apply(observing, rules(options, at), mode="observe") as observe:
        got = run(case, observing, steps=1)
    assert same(got, plain)
    assert observe.status() == act.status()


def test_an_edit_leaves_the_other_side_of_a_sum_alone() -> None:
    # Both parameters of `pos + kind` are handed the same gradient tensor.
    case = CASES["residual"]
    model = case.make()
    plain = case.make()
    case.backward(plain, 0)
    with gradsurgeon.apply(model, rules({"action": "zero"}, "backward", "pos")):
        case.backward(model, 0)
    assert model.pos.grad is not None
    assert model.kind.grad is not None
    assert isinstance(plain.kind, Tensor)
    assert plain.kind.grad is not None
    assert not model.pos.grad.any()
    assert torch.equal(model.kind.grad, plain.kind.grad)
    assert plain.kind.grad.any()


@pytest.mark.parametrize("at", ["backward", "step"])
def test_the_gradient_that_the_script_hands_in_is_not_written(at: str) -> None:
    model = nn.Linear(3, 1, bias=False)
    handed = torch.ones(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsurgeon.apply(model, rules({"action": "scale", "factor": 5.0}, at)):
        model.weight.view(3).backward(handed)
        optimizer.step()
    assert handed.tolist() == [1.0, 1.0, 1.0]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[5.0, 5.0, 5.0]]


def test_one_tensor_as_two_gradients_is_edited_once_for_each() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(3, 1))
            self.b = nn.Parameter(torch.ones(1, 3))

    model = Two()
    handed = torch.ones(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsurgeon.apply(model, rules({"action": "scale", "factor": 0.5}, "step")):
        torch.autograd.backward([model.a.view(3), model.b.view(3)], [handed, handed])
        optimizer.step()
    assert model.a.grad is not None
    assert model.b.grad is not None
    assert model.a.grad.flatten().tolist() == [0.5, 0.5, 0.5]
    assert model.b.grad.flatten().tolist() == [0.5, 0.5, 0.5]
    assert handed.tolist() == [1.0, 1.0, 1.0]


# Torch warns of the cycle once per process, so that another test may have heard it.
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_an_edit_of_a_gradient_with_a_graph_keeps_the_graph() -> None:
    model = nn.Linear(2, 1, bias=False)
    options: dict[str, object] = {"action": "scale", "factor": 3.0}
    with gradsurgeon.apply(model, rules(options, "step"), optimizer=[]) as session:
        model.weight.pow(3).sum().backward(create_graph=True)
        first = model.weight.grad
        assert first is not None
        session.tick()
        (second,) = torch.autograd.grad(first.sum(), model.weight)
    assert torch.equal(second, 6 * model.weight)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, 3 * first)
    model.weight.grad = None


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
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
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


def test_autograd_grad_is_left_alone_with_one_notice() -> None:
    model = nn.Linear(2, 1, bias=False)
    with gradsurgeon.apply(model, rules({"action": "scale", "factor": 3.0}, "backward")) as session:
        for _ in range(2):
            (found,) = torch.autograd.grad(model.weight.sum(), model.weight)
            assert found.tolist() == [[1.0, 1.0]]
        model.weight.sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[3.0, 3.0]]
    notices = [event for event in session.events if "autograd.grad" in event.message]
    assert [event.kind for event in notices] == ["notice"]
    assert session.status()["it"].fired == 1


@pytest.mark.filterwarnings("ignore:weight got a gradient that did not pass")
def test_half_precision_bounds_beyond_its_range() -> None:
    model = nn.Linear(2, 2, bias=False).to(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradsurgeon.apply(model, rules({"action": "clamp", "min": -1e6, "max": 1e6}, "step")):
        model.weight.grad = torch.tensor([[1.0, 65504.0], [float("inf"), float("-inf")]]).half()
        optimizer.step()
    assert model.weight.grad.tolist() == [[1.0, 65504.0], [65504.0, -65504.0]]


def test_a_bound_on_sparse_contributions_tells_that_they_are_summed() -> None:
    case = CASES["sparse"]
    model = case.make()
    bound = {"id": "c", "action": "clamp", "at": "backward", "params": "emb.*", "min": -1, "max": 1}
    rules = {"version": 1, "rules": [bound]}
    with gradsurgeon.apply(model, rules, optimizer=[]) as session:
        case.backward(model, 0)
        with pytest.warns(gradsurgeon.GradSurgeonWarning, match="several feed one update"):
            case.backward(model, 1)
        assert session.status()["c"].fired == 2


def test_a_sparse_gradient_that_would_become_dense_is_refused() -> None:
    case = CASES["sparse"]
    options: dict[str, object] = {"action": "clamp", "min": 0.5}
    with pytest.raises(gradsurgeon.BindError, match=r"1 parameters are sparse \(emb.weight\)"):
        gradsurgeon.apply(case.make(), rules(options, "step"))
