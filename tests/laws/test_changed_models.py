"""Parameters and modules that come, go, thaw, or change name and form after `apply`: never silently."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import data
from pairs import singly
from ranks import Json
from small import attach, fields_of, fired, messages, net, rule_file, sgd
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import gradsurgeon
from gradsurgeon import BindError, GradSurgeonWarning

POINTS: dict[str, Json] = {
    "zero, backward": {"action": "zero"},
    "zero, step": {"action": "zero", "at": "step"},
    "norm-log, backward": {"action": "norm-log", "at": "backward"},
    "norm-log, accumulated": {"action": "norm-log"},
    "norm-log, step": {"action": "norm-log", "at": "step"},
    "freeze, step": {"action": "freeze"},
    "nan-trap": {"action": "nan-trap"},
}
POINT = pytest.mark.parametrize("point", POINTS)


def rules(point: str, params: str = "*", **more: Any) -> Json:
    return rule_file({"id": "it", "params": params, **POINTS[point], **more})


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(data(0, 5, 4).to(dtype)).square().mean().backward()
    optimizer.step()


def told(session: Any, warned: Any) -> list[tuple[str, str, str]]:
    """Return the events, and check that each was warned of, what happened to several at once once."""
    texts = [str(one.message) for one in warned if one.category is GradSurgeonWarning]
    assert all(any(e.message in t or e.name in t for t in texts) for e in session.events)
    assert len(texts) == len(
        {(e.kind, e.rule, e.message.replace(e.name, "")) for e in session.events}
    )
    return fields_of(session, "kind", "rule", "name")


# --- lazy and frozen ------------------------------------------------------------------------------


@POINT
def test_lazy_modules_are_refused_and_bind_after_a_forward_pass(point: str) -> None:
    model = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.Linear(6, 2))
    with pytest.raises(BindError, match=r"\(0\.weight, 0\.bias\).*run one forward pass before"):
        gradsurgeon.apply(model, rules(point))
    model(data(0, 5, 4))
    optimizer = sgd(model)
    with gradsurgeon.apply(model, rules(point)) as session:
        step(model, optimizer)
        assert fired(session)["it"] == (1 if point == "nan-trap" else 4)
    assert session.events == []


def same_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


def one_more_group(model: Any, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
    optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in owned]})
    return optimizer


def exchanged_in_place(model: Any, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.param_groups[0]["params"][:] = list(model.parameters())
    return optimizer


def a_new_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return sgd(model)


Goes = Callable[[Any, torch.optim.Optimizer], torch.optim.Optimizer]


@singly(goes_on=[same_optimizer, one_more_group, a_new_optimizer], point=POINTS)
def test_parameters_that_are_thawed_come_under_their_rules(point: str, goes_on: Goes) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer: torch.optim.Optimizer = sgd(model)
    if goes_on is one_more_group:
        optimizer = sgd(model[2])
    with gradsurgeon.apply(model, rules(point, "0.*", steps={"from": 1})) as session:
        for _ in range(2):
            step(model, optimizer)
        assert fired(session)["it"] == 0
        model[0].requires_grad_(True)
        optimizer = goes_on(model, optimizer)
        for _ in range(2):
            before = model[0].weight.detach().clone()
            step(model, optimizer)
        if point in ("zero, backward", "zero, step", "freeze, step"):
            assert torch.equal(before, model[0].weight)
        assert fired(session)["it"] == (2 if point == "nan-trap" else 4)
        assert session.step == 4
    assert session.events == []


@pytest.mark.parametrize("change", ["replaced", "assigned", "wrapped"])
@pytest.mark.parametrize("at", ["backward", "step"])
@pytest.mark.filterwarnings("ignore:rule it. matches 2 parameters that came after")
def test_what_changes_before_the_first_update_comes_under_the_rules(change: str, at: str) -> None:
    model = net()
    zero = {"id": "it", "action": "zero", "at": at, "params": "*.weight"}
    with attach(model, zero) as session:
        {"replaced": replaced, "assigned": assigned, "wrapped": adapted}[change](model)
        step(model, sgd(model))
        assert fired(session)["it"] == 2
        assert not any(
            param.grad.any() for name, param in model.named_parameters() if "weight" in name
        )
    assert [event for event in session.events if event.kind != "notice"] == []


# --- another form, the same parameters ------------------------------------------------------------


def assigned(model: Any) -> None:
    weights = {name: one.clone() for name, one in model.state_dict().items() if "weight" in name}
    model.load_state_dict(weights, assign=True, strict=False)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model[0], "weight", amount=0.3)


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model[0], "weight", nn.Identity())


def spectral(model: Any) -> None:
    parametrizations.spectral_norm(model[0])


@singly(change=[pruned, parametrized, spectral, assigned], point=POINTS)
def test_a_parameter_that_gets_another_name_loses_its_rules(point: str, change: Any) -> None:
    model = net()
    optimizer = sgd(model)
    with gradsurgeon.apply(model, rules(point, "0.weight")) as session:
        step(model, optimizer)
        count = fired(session)["it"]
        change(model)
        with pytest.warns(
            GradSurgeonWarning, match=r"0\.weight was replaced, renamed, .* again with replace=True"
        ) as warned:
            step(model, optimizer)
        assert told(session, warned) == [("hook-lost", "", "0.weight")]
        step(model, optimizer)
        assert fired(session)["it"] == count
    assert len(session.events) == 1


def loaded(model: Any) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def from_a_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector, model.parameters())


@singly(
    change=[nn.Module.double, nn.Module.bfloat16, nn.Module.share_memory, loaded, from_a_vector],
    point=POINTS,
)
def test_what_keeps_parameters_is_no_news(point: str, change: Callable[[Any], object]) -> None:
    model = net()
    optimizer = sgd(model)
    with gradsurgeon.apply(model, rules(point)) as session:
        step(model, optimizer)
        count = fired(session)["it"]
        change(model)
        for number in range(2, 5):
            step(model, optimizer)
            assert fired(session)["it"] == number * count
    assert session.events == []


# --- a head of another shape ----------------------------------------------------------------------


@singly(goes_on=[one_more_group, exchanged_in_place, a_new_optimizer], point=POINTS)
def test_no_rule_acts_on_a_replaced_head_until_rules_are_applied_again(
    point: str, goes_on: Goes
) -> None:
    model = net()
    optimizer: torch.optim.Optimizer = sgd(model)
    session = gradsurgeon.apply(model, rules(point, "2.*"))
    step(model, optimizer)
    count = fired(session)["it"]
    model[2] = nn.Linear(6, 5)
    optimizer = goes_on(model, optimizer)
    with pytest.warns(
        GradSurgeonWarning, match=r"2\.weight, 2\.bias: each was replaced.*replace=True"
    ) as warned:
        for _ in range(3):
            before = model[2].weight.detach().clone()
            step(model, optimizer)
            assert not torch.equal(before, model[2].weight)
    assert told(session, warned) == [("hook-lost", "", "2.weight"), ("hook-lost", "", "2.bias")]
    assert fired(session)["it"] == count
    with gradsurgeon.apply(model, rules(point, "2.*"), replace=True) as again:
        for _ in range(3):
            before = model[2].weight.detach().clone()
            step(model, optimizer)
            if point in ("zero, backward", "zero, step", "freeze, step"):
                assert torch.equal(before, model[2].weight)
        assert fired(again)["it"] == (3 if point == "nan-trap" else 6)
    assert again.events == []


def test_a_replaced_head_of_a_hand_written_loop() -> None:
    model = net()
    with gradsurgeon.apply(model, rules("zero, backward", "2.*"), optimizer=[]) as session:

        def update() -> None:
            model.zero_grad()
            model(data(0, 5, 4)).square().mean().backward()
            session.tick()

        update()
        model[2] = nn.Linear(6, 5)
        with pytest.warns(GradSurgeonWarning, match=r"2\.weight, 2\.bias: each was replaced"):
            for _ in range(2):
                update()
        assert model[2].weight.grad.any()


def test_a_replaced_parameter_without_rules_is_no_news() -> None:
    model = net()
    optimizer = sgd(model)
    with gradsurgeon.apply(model, rules("zero, backward", "0.*")) as session:
        step(model, optimizer)
        model[2] = nn.Linear(6, 5)
        model.append(nn.Linear(5, 2))
        optimizer = sgd(model)
        for _ in range(3):
            step(model, optimizer)
        assert fired(session)["it"] == 8
    assert session.events == []


@pytest.mark.parametrize(
    "check",
    [
        {"action": "check-structure"},
        {"action": "check-update", "moved": {"max": 0}},
        {"action": "check-update", "moved": {"min": 1.0, "within": 20}},
    ],
    ids=str,
)
def test_checks_go_on_without_what_is_taken_out(check: Json) -> None:
    model = net()
    optimizer = sgd(model)
    document = rule_file({"id": "it", "params": "*", **check})
    with (
        warnings.catch_warnings(action="ignore", category=GradSurgeonWarning),
        gradsurgeon.apply(model, document) as session,
    ):
        step(model, optimizer)
        del model[2]
        for _ in range(3):
            step(model, optimizer)
    assert session.status()["it"].last_step == 3
    lost = fields_of(session, "rule", "name", kind="hook-lost")
    assert lost == [("", "2.weight"), ("", "2.bias")]


# --- new names ------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it, as fine-tuning libraries make them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, 4))
        self.up = nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + x @ self.down.T @ self.up.T


@singly(goes_on=[one_more_group, a_new_optimizer], point=POINTS, frozen=[True, False])
def test_adapters_are_said_not_to_be_under_the_rules(
    point: str, goes_on: Goes, frozen: bool
) -> None:
    model = net()
    optimizer: torch.optim.Optimizer = sgd(model)
    with gradsurgeon.apply(model, rules(point)) as session:
        step(model, optimizer)
        count = fired(session)["it"]
        model[0].requires_grad_(not frozen)
        model[0] = Adapted(model[0])
        optimizer = goes_on(model, optimizer)
        with pytest.warns(GradSurgeonWarning) as warned:
            step(model, optimizer)
        assert told(session, warned) == [("notice", "it", "")]
        assert "matches 2 parameters that came after the rules were applied (0.down, 0.up)" in (
            session.events[0].message
        )
        assert "replace=True" in session.events[0].message
        for _ in range(3):
            step(model, optimizer)
        # The layer has other names now, and its rules act on.
        share = 1 if point == "nan-trap" or not frozen else 0.5
        assert fired(session)["it"] == count + 4 * count * share
    assert len(session.events) == 1


@pytest.mark.parametrize("steps", [0, 1])
def test_what_no_step_has_shown_is_noted_in_the_end(steps: int) -> None:
    model = net()
    optimizer = sgd(model)
    with gradsurgeon.apply(model, rules("zero, backward")) as session:
        for _ in range(4):
            step(model, optimizer)
        # Past the registration that modules offer.
        model._modules["3"] = nn.Linear(2, 2)
        model._modules["2"] = nn.Linear(6, 2)
        for _ in range(steps):
            step(model, optimizer)
        assert session.events == []
    found = fields_of(session, "kind", "rule", "name")
    assert found == [
        ("hook-lost", "", "2.weight"),
        ("hook-lost", "", "2.bias"),
        ("notice", "it", ""),
    ]
    assert "3.weight, 3.bias" in session.events[2].message


def test_a_rule_whose_parameters_are_gone_before_it_fired_is_mentioned_twice() -> None:
    model = net()
    with gradsurgeon.apply(model, rules("zero, backward", "2.*", steps={"from": 1})) as session:
        model[2] = nn.Identity()
        optimizer = sgd(model)
        with pytest.warns(GradSurgeonWarning):
            for _ in range(5):
                step(model, optimizer)
    said = messages(session, "never-fired")
    cause = "the parameters the rule matched are gone from the model"
    assert f"was due in 3 steps and has not fired yet: {cause}" in fields_of(session, "message")
    assert said == [f"was due in 4 steps and never fired: {cause}"]


# --- tying and untying ----------------------------------------------------------------------------


class Embedded(nn.Module):
    """An embedding and a head that can share their weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.emb((x.abs() * 2).long().clamp(max=5)))


@pytest.mark.parametrize("at", ["backward", "step"])
def test_a_weight_that_is_tied_later_is_edited_once(at: str) -> None:
    half = {"id": "it", "action": "scale", "factor": 0.5, "at": at, "params": "*"}
    plain, model = Embedded(tied=True), Embedded(tied=False)
    with attach(model, half) as session:
        step(model, sgd(model))
        model.head.weight = model.emb.weight
        optimizer = sgd(model)
        with pytest.warns(
            GradSurgeonWarning,
            match=r"head\.weight was replaced, .* or tied to another parameter",
        ) as said:
            step(model, optimizer)
        assert told(session, said) == [("hook-lost", "", "head.weight")]
        plain.load_state_dict(model.state_dict())
        step(model, optimizer)
        step(plain, sgd(plain))
        assert model.emb.weight.grad is not None
        assert plain.emb.weight.grad is not None
        assert torch.allclose(model.emb.weight.grad, plain.emb.weight.grad * 0.5)
    assert len(session.events) == 1


# --- modules --------------------------------------------------------------------------------------

SITES: dict[str, Json] = {
    "zero output.grad": {"action": "zero", "tensor": "output.grad"},
    "zero input.grad": {"action": "zero", "tensor": "input.grad"},
    "norm-log output": {"action": "norm-log", "tensor": "output"},
    "nan-trap input": {"action": "nan-trap", "tensor": "input"},
}


@pytest.mark.parametrize("site", SITES)
def test_hooks_on_a_module_that_is_replaced_come_back(site: str) -> None:
    model = net()
    rule = {"id": "it", "modules": "2", **SITES[site]}
    optimizer = sgd(model)
    with attach(model, rule) as session:
        step(model, optimizer)
        old = model[2]
        model[2] = nn.Linear(6, 5)
        optimizer = sgd(model)
        count = fired(session)["it"]
        with pytest.warns(GradSurgeonWarning) as warned:
            step(model, optimizer)
        assert ("hook-rearmed", "", "2") in told(session, warned)
        assert not old._forward_hooks
        assert not old._forward_pre_hooks
        for number in range(1, 4):
            assert fired(session)["it"] == count + number
            step(model, optimizer)
    assert not model[2]._forward_hooks
    assert not model[2]._forward_pre_hooks


def test_modules_that_come_later_are_said_not_to_be_under_the_rules() -> None:
    model = net()
    rule = {"id": "it", "modules": "*", **SITES["norm-log output"]}
    with attach(model, rule) as session:
        model.append(nn.Linear(2, 2))
        optimizer = sgd(model)
        with pytest.warns(GradSurgeonWarning, match=r"1 module that came after .* \(3\)") as warned:
            for _ in range(3):
                step(model, optimizer)
        assert told(session, warned) == [("notice", "it", "")]
    assert len(session.events) == 1


@singly(point=POINTS, change=["replaced", "added"])
@pytest.mark.filterwarnings("ignore:2.weight was replaced", "ignore:.*has not fired yet")
def test_what_changes_while_rules_rest_is_known_when_they_are_due(point: str, change: str) -> None:
    model = net()
    owned = model[0].parameters() if change == "added" else model.parameters()
    optimizer = torch.optim.SGD(owned, lr=0.1)
    document = rules(point, "2.weight", steps={"from": 6})
    with gradsurgeon.apply(model, document, optimizer=optimizer) as session:
        for number in range(8):
            if number == 4 and change == "replaced":
                # Past the module, which would tell of it.
                model[2]._parameters["weight"] = nn.Parameter(model[2].weight.detach().clone())
                optimizer.param_groups[0]["params"][2] = model[2].weight
            elif number == 4:
                optimizer.add_param_group({"params": [model[2].weight]})
            before = model[2].weight.detach().clone()
            step(model, optimizer)
            if point.startswith(("zero", "freeze")) and number >= 4:
                acts = number >= 6 and change == "added"
                assert torch.equal(model[2].weight, before) == acts
        status = session.status()["it"]
        assert (status.fired, status.last_step) == ((2, 7) if change == "added" else (0, None))
        lost = fields_of(session, "name", kind="hook-lost")
        assert lost == ([] if change == "added" else ["2.weight"])


# -------------------------------------------------------------------------------------------------
# Parameters that are replaced or converted under the rules: hooks come back, and it is said.
# -------------------------------------------------------------------------------------------------


ZERO: Json = rule_file({"id": "zero", "action": "zero", "params": "*.weight"})


def acts(model: Any) -> bool:
    return not any(layer.weight.grad.any() for layer in model[::2])


def replaced(model: Any) -> None:
    for layer in model[::2]:
        layer.weight = nn.Parameter(layer.weight.detach().clone())


def adapted(model: Any) -> None:
    model[0] = Adapted(model[0])


def swapped(model: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_hooks_come_back_to_parameters_with_new_content_with_one_warning() -> None:
    model = net()
    with gradsurgeon.apply(model, ZERO) as session:
        step(model, sgd(model))
        swapped(model)
        text = r"0\.weight, 2\.weight: each got new content"
        with pytest.warns(GradSurgeonWarning, match=text) as said:
            step(model, sgd(model))
        assert len(said) == 1
        assert acts(model)  # nothing was missed
        step(model, sgd(model))
        assert acts(model)
    rearmed = fields_of(session, "kind", "name")
    assert rearmed == [("hook-rearmed", "0.weight"), ("hook-rearmed", "2.weight")]


def test_gradients_assigned_by_hand_are_seen_at_the_update_and_by_no_rule_at_backward() -> None:
    model = net()
    optimizer = sgd(model)
    norms = {"action": "norm-log", "params": "*"}
    more = [{"id": "late", "at": "step", **norms}, {"id": "early", **norms}]
    rules = rule_file(*ZERO["rules"], *more)
    with (
        gradsurgeon.apply(model, rules, optimizer=optimizer) as session,
        pytest.warns(GradSurgeonWarning, match="no backward pass that the rule could see") as said,
    ):
        for number in range(1, 4):
            for param in model.parameters():
                param.grad = torch.full_like(param, float(number))
            optimizer.step()
        for rule in ("late", "early"):
            found = dict(session.history("0.bias", rule=rule))
            assert found == pytest.approx({0: 6**0.5, 1: 24**0.5, 2: 54**0.5})
        assert model[0].weight.grad.eq(3.0).all()
    assert [str(one.message).split(": ")[0] for one in said] == ["rule zero"]


def test_hooks_that_somebody_has_taken_off_come_back() -> None:
    model = net()
    with gradsurgeon.apply(model, ZERO) as session:
        step(model, sgd(model))
        model[0].weight._backward_hooks.clear()
        with pytest.warns(GradSurgeonWarning, match="0.weight lost its hooks"):
            step(model, sgd(model))
        step(model, sgd(model))
        assert acts(model)
    assert fields_of(session, "kind", "name") == [("hook-rearmed", "0.weight")]
