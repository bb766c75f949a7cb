"""`clip-norm` per module, prefix and unit, beside the functions that people call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import attach, linears, rule_file, sgd
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gradsurgeon
from gradsurgeon.actions.clip_norm import BOTH_FORMS, BY_ITSELF


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.h = nn.ModuleList([linears(6, 6, 6) for _ in range(12)])
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x[:, None])[:, 0]
        for block in self.h:
            out = block(out).tanh() + out
        return self.head(out)  # type: ignore[no-any-return] # a tensor


def gradients(
    rule: dict[str, Any] | None, by_hand: Callable[[Net], object] = lambda _: None
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(8, 6) * 5
    optimizer = sgd(model, 0.0)
    session = None
    if rule is not None:
        options = {"id": "it", "action": "clip-norm", "params": "*", "max_norm": 1.0, **rule}
        session = attach(model, options, optimizer=optimizer)
    model(x).square().sum().backward()
    by_hand(model)
    optimizer.step()
    if session is not None:
        session.remove()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def same(left: dict[str, Tensor], right: dict[str, Tensor], rtol: float) -> None:
    assert left.keys() == right.keys()
    for name, grad in left.items():
        torch.testing.assert_close(grad, right[name], rtol=rtol, atol=1e-7)


def test_the_matches_below_each_module_of_a_prefix_share_a_norm() -> None:
    def by_hand(model: Net) -> None:
        for block in model.h:
            clip_grad_norm_(block.parameters(), 1.0)

    # `h.1` is no part of `h.11`.
    same(gradients({"params": "h.*", "per": "h.{n}"}), gradients(None, by_hand), 2e-6)


def test_the_parameters_of_each_module_share_a_norm() -> None:
    def by_hand(model: Net) -> None:
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own:
                clip_grad_norm_(own, 1.0)

    same(gradients({"per": "module"}), gradients(None, by_hand), 2e-6)


def test_parameters_below_no_such_module_are_refused() -> None:
    with pytest.raises(gradsurgeon.BindError) as refused:
        gradients({"per": "h.{n}"})
    texts = "\n".join(refused.value.complaints)
    assert "head.weight is below no module `h.{n}`; leave it out by `exclude`" in texts
    assert "h.0.0" not in texts


def unit_norm(tensor: Tensor) -> Tensor:
    dims = tuple(range(1, tensor.ndim)) or None
    norm: Tensor = torch.linalg.vector_norm(tensor, 2.0, dim=dims, keepdim=True)
    return norm


def adaptive_clip(model: Net, factor: float, least: float = 1e-3) -> None:
    """Clip as NFNets do (Brock et al. 2021, algorithm 2 with the units of timm)."""
    for param in model.parameters():
        grad = param.grad
        assert grad is not None
        bound = unit_norm(param.detach()).clamp(min=least) * factor
        norm = unit_norm(grad)
        shorter = grad * (bound / norm.clamp(min=1e-6))
        param.grad = torch.where(norm < bound, grad, shorter)


@pytest.mark.parametrize("factor", [0.01, 1.0, 100.0])
def test_adaptive_clipping_is_that_of_nfnets(factor: float) -> None:
    rule = {"per": "unit", "relative_to": "weight", "max_norm": factor}
    same(gradients(rule), gradients(None, lambda model: adaptive_clip(model, factor)), 1e-6)


def test_a_unit_has_a_fixed_bound_too() -> None:
    for grad in gradients({"per": "unit", "max_norm": 0.5}).values():
        assert (unit_norm(grad) <= 0.5 + 1e-5).all()


def test_lint_and_plan_say_what_a_clip_without_per_means() -> None:
    plain = {"id": "it", "action": "clip-norm", "params": "*", "max_norm": 1.0}
    text = str(gradsurgeon.plan(Net(), rule_file(plain)))
    assert BY_ITSELF in text
    assert BOTH_FORMS in text
    for per in ("parameter", "rule"):
        stated = rule_file({**plain, "per": per})
        assert "by itself" not in str(gradsurgeon.plan(Net(), stated))


def test_the_plan_says_nothing_of_a_clip_without_per_beside_one_that_says_it() -> None:
    plain = {"id": "it", "action": "clip-norm", "params": "*", "max_norm": 1.0}
    stated = {**plain, "id": "other", "per": "rule"}
    assert BY_ITSELF not in str(gradsurgeon.plan(Net(), rule_file(plain, stated)))


def test_apply_says_once_what_clips_without_per_mean() -> None:
    plain = {"action": "clip-norm", "params": "*", "max_norm": 1.0}
    other = {**plain, "params": "*.bias", "id": "other"}
    with pytest.warns(gradsurgeon.GradSurgeonWarning) as warned:
        session = gradsurgeon.apply(Net(), rule_file(plain, other))
    with session:
        (event,) = session.events
    text = (
        "clips each gradient by itself, where `clip_grad_norm_` clips all by their common norm: "
        "write `per: rule` for the common norm, or `per: parameter`"
    )
    assert [str(warning.message) for warning in warned] == [f"rule r0: {text}"]
    assert (event.kind, event.rule, event.message) == ("notice", "r0", text)
    at_backward = {**plain, "at": "backward"}
    for meant in (
        [{**plain, "per": "rule"}, other],
        [{**plain, "per": "parameter"}],
        [at_backward],
    ):
        with gradsurgeon.apply(Net(), rule_file(*meant)) as session:
            assert session.events == []


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_group_whose_norm_is_not_finite_leaves_the_other_groups_their_own_norms(
    size: float,
) -> None:
    model = linears(3, 3, 3, 3)
    model[2].register_parameter("bias", None)
    rule = {"id": "it", "action": "clip-norm", "params": "*", "per": "module", "max_norm": 1e-3}
    session = attach(model, rule, optimizer=sgd(model, 0.0))
    given = {name: torch.randn_like(param) * size for name, param in model.named_parameters()}
    given["0.bias"][1] = float("nan")
    given["1.weight"].zero_()
    for name, param in model.named_parameters():
        param.grad = given[name].clone()
    sgd(model, 0.0).step()
    for module, layer in model.named_children():
        before = {name: given[f"{module}.{name}"].double() for name, _ in layer.named_parameters()}
        norm = torch.cat([grad.flatten() for grad in before.values()]).norm().item()
        factor = 1.0 if module == "0" else min(1.0, 1e-3 / (norm + 1e-6))
        for name, param in layer.named_parameters():
            assert param.grad is not None
            expected = before[name] * factor
            torch.testing.assert_close(
                param.grad.double(), expected, rtol=1e-5, atol=0.0, equal_nan=True
            )
    session.remove()
