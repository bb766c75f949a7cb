"""Activation checkpointing: nothing is counted, edited or recorded twice, in either kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import data, same
from pairs import singly
from ranks import Json
from small import (
    attach,
    equal,
    fields_of,
    fired,
    kinds_of,
    linears,
    rule_file,
    sgd,
    steps_of,
    take_step,
    weights_of,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon import NonFiniteGradientError, Session

KINDS = [None, True, False]
IDS = ["none", "reentrant", "not reentrant"]


class Net(nn.Module):
    """Two checkpointed blocks between two layers that are not."""

    def __init__(self, reentrant: bool | None, *, whole: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.whole = whole
        self.first = nn.Linear(4, 4)
        self.a = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 2)

    def block(self, module: nn.Module, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return module(x)  # type: ignore[no-any-return]
        return checkpoint(module, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def inside(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.b(self.a(self.first(x))))
        return out

    def forward(self, x: Tensor) -> Any:
        if self.whole and self.reentrant is not None:
            return checkpoint(self.inside, x, use_reentrant=self.reentrant)
        if self.whole:
            return self.inside(x)
        return self.last(self.block(self.b, self.block(self.a, self.first(x))))


RULES = """
version: 1
rules:
  - {id: bound, action: clamp, params: "*", at: backward, min: -0.1, max: 0.1}
  - {id: half, action: scale, modules: a.0, tensor: output.grad, factor: 0.5}
  - {id: more, action: scale, modules: b.0, tensor: output, factor: 1.5}
  - {id: spikes, action: spike-trap, params: "*", above: {times: 1.01, warmup: 2}}
  - {id: late, action: clip-norm, params: "*", max_norm: 0.2, per: rule}
  - {id: norms, action: norm-log, params: "*"}
  - {id: each, action: norm-log, params: "*", at: backward}
  - {id: acts, action: norm-log, modules: a.0, tensor: output}
  - {id: trap, action: nan-trap, params: "*"}
"""


def run(reentrant: bool | None, *, whole: bool, fault: int = -1) -> tuple[Any, Session]:
    torch.manual_seed(6)
    model = Net(reentrant, whole=whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with gradsurgeon.apply(model, RULES) as session:
        for number in range(3):
            optimizer.zero_grad()
            x = data(number, 5, 4).requires_grad_(True)
            bad = float("nan") if number == fault else 1.0
            (model(x).square().mean() * 5 * bad).backward()
            optimizer.step()
    return model, session


@pytest.mark.cell(
    "activation checkpointing, not reentrant", "backward", "accumulated", "step", "modules"
)
@pytest.mark.cell(
    "activation checkpointing, reentrant", "backward", "accumulated", "step", "modules"
)
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole model"])
@pytest.mark.parametrize("reentrant", [True, False], ids=IDS[1:])
def test_the_same_as_without_checkpointing(reentrant: bool, whole: bool) -> None:
    plain, plain_session = run(None, whole=whole)
    model, session = run(reentrant, whole=whole)
    assert same(weights_of(model), weights_of(plain))
    assert session.status() == plain_session.status()
    assert session.events == plain_session.events == []
    for rule in ("norms", "each"):
        for name, _ in model.named_parameters():
            wanted = plain_session.history(name, rule=rule)
            assert session.history(name, rule=rule) == wanted
            assert [step for step, _ in wanted] == [0, 1, 2]
    # The forward that checkpointing repeats inside backward is no second record.
    assert session.history("a.0") == plain_session.history("a.0")
    assert len(session.history("a.0")) == 3


@pytest.mark.parametrize("action", [{"action": "clamp", "max": 0.1}, {"action": "sanitize"}])
@pytest.mark.parametrize("module", ["0", "1"])
def test_an_edit_where_torch_ends_the_second_forward_pass(module: str, action: Json) -> None:
    # torch leaves the second pass by an error, as soon as the last saved tensor is there.
    rule = {"id": "edit", "modules": module, "tensor": "output", **action}
    grads = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = linears(4, 4, 4)
        x = data(0, 5, 4).requires_grad_(True)
        with gradsurgeon.apply(model, {"version": 1, "rules": [rule]}):
            out = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
            out.square().sum().backward()
        grads.append([param.grad for param in model.parameters()])
    assert equal(*grads)


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole model"])
@pytest.mark.parametrize("reentrant", KINDS, ids=IDS)
def test_the_trap_sees_one_pass(reentrant: bool | None, whole: bool) -> None:
    with pytest.raises(NonFiniteGradientError) as caught:
        run(reentrant, whole=whole, fault=1)
    first = str(caught.value).splitlines()[0]
    assert first == "step 1, rule trap: 8 of 8 gradients are not finite after backward"
    assert caught.value.name == "last.bias"


@pytest.mark.parametrize("reentrant", [True, False], ids=IDS[1:])
@pytest.mark.parametrize(
    ("modules", "tensor"), [("a.0", "output"), ("a.0", "input"), ("b.1", "output"), ("a", "output")]
)
def test_a_trap_inside_a_region_stops_the_update(
    reentrant: bool, modules: str, tensor: str
) -> None:
    model = Net(reentrant)
    optimizer = sgd(model)
    rule = {"id": "t", "action": "nan-trap", "modules": modules, "tensor": tensor}
    rule["then"] = "skip-step"
    with attach(model, rule) as session:
        for number in range(3):
            optimizer.zero_grad()
            x = data(number, 5, 4)
            if number == 1:
                x[0, 0] = float("nan")
            model(x).square().mean().backward()
            optimizer.step()
        events = fields_of(session, "kind", "step")
    assert events == [("trap", 1), ("skipped-step", 1)]
    assert all(param.isfinite().all() for param in model.parameters())


class Twice(nn.Module):
    """One layer inside a checkpointed region and outside of it."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.shared(self.first(x))
        if self.reentrant is None:
            x = self.shared(x)
        else:
            x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return self.last(x)


def run_twice(reentrant: bool | None, **rule: Any) -> tuple[Twice, Session]:
    torch.manual_seed(6)
    model = Twice(reentrant)
    optimizer = sgd(model, 0.05)
    rules = rule_file({"id": "it", "params": "*", **rule})
    with gradsurgeon.apply(model, rules) as session:
        for number in range(2):
            take_step(optimizer, model(data(number, 5, 4)).square().mean() * 5)
    return model, session


BOUND = {"action": "clamp", "min": -0.02, "max": 0.02}
SEEN = {"action": "norm-log"}


def largest(model: Twice) -> float:
    assert model.shared.weight.grad is not None
    return float(model.shared.weight.grad.abs().max())


@pytest.mark.cell(
    "activation checkpointing, reentrant",
    "backward",
    differs="a parameter used inside and outside a region gets its gradient in parts: bounds hold per part, `norm-log` records one part, with one warning",
)
@pytest.mark.parametrize(
    "rule",
    [BOUND, {"action": "clip-norm", "max_norm": 0.02}, SEEN, {"action": "capture"}],
    ids=["clamp", "clip-norm", "norm-log", "capture"],
)
def test_parts_of_a_gradient_are_told_of_once(rule: Json) -> None:
    said = "rule it: gets parts of a gradient, never their sum"
    with pytest.warns(gradsurgeon.GradSurgeonWarning, match=said) as warned:
        model, session = run_twice(True, **rule, at="backward")
    (event,) = session.events
    assert (event.kind, event.rule, event.step) == ("notice", "it", 0)
    assert "(checkpoint(use_reentrant=True)) reached shared." in event.message
    assert "`use_reentrant=False`" in event.message
    assert len(warned) == 1
    status = session.status()["it"]
    assert status.warnings == (event.message,)
    # Six parameters, two of them twice, in two steps.
    assert status.fired == 2 * (6 + 2)
    if rule is BOUND:
        assert 0.02 < largest(model) <= 0.04 + 1e-6
    if rule is SEEN:
        assert steps_of(session, "shared.weight") == [0, 1]
    if rule["action"] == "capture":
        found = [key for key in session.captured("it") if key[0] == "shared.weight"]
        assert [key[1:] for key in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("reentrant", KINDS, ids=IDS)
@pytest.mark.parametrize(
    "rule",
    [
        {"action": "scale", "factor": 0.5, "at": "backward"},
        {**BOUND, "at": "step"},
        {**BOUND, "at": "backward", "params": ["first.*", "last.*"]},
        {**BOUND, "at": "backward", "steps": {"from": 2}},
        {**SEEN, "at": "accumulated"},
    ],
    ids=["linear", "at step", "used once", "not due", "accumulated"],
)
def test_what_means_the_same_in_parts_needs_no_word(reentrant: bool | None, rule: Json) -> None:
    model, session = run_twice(reentrant, **rule)
    plain, plain_session = run_twice(None, **rule)
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=1e-5, atol=1e-07)
    assert kinds_of(session) == ["never-fired"] * ("steps" in rule)
    if rule["action"] == "norm-log":
        found, wanted = (one.history("shared.weight") for one in (session, plain_session))
        assert [step for step, _ in found] == [0, 1]
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in wanted])


@pytest.mark.parametrize("reentrant", [True, False], ids=IDS[1:])
def test_updates_by_hand_see_one_pass_as_well(reentrant: bool) -> None:
    model = Net(reentrant)
    with attach(model, {"action": "norm-log", "params": "*"}) as session:
        for step in range(3):
            model.zero_grad()
            model(data(step, 5, 4).requires_grad_()).square().mean().backward()
            norms = [float(param.grad.norm()) for param in model.parameters()]  # type: ignore[union-attr] # each has one
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(param.grad, alpha=0.1)  # type: ignore[arg-type] # the same
    assert session.step == 3
    assert [event.message[:18] for event in session.events] == ["no torch optimizer"]
    for (name, _), norm in zip(model.named_parameters(), norms, strict=True):
        assert steps_of(session, name) == [0, 1, 2]
        assert session.latest(name) == pytest.approx(norm)


WATCHING = [
    {"id": "norms", "action": "norm-log", "params": "*"},
    {"id": "back", "action": "norm-log", "modules": "*", "tensor": "output.grad"},
    {"id": "kept", "action": "capture", "modules": "*", "tensor": "output.grad"},
    {"id": "seen", "action": "nan-trap", "modules": "*", "tensor": "output.grad"},
]


@singly(frozen=[("a",), ("b",), ("a", "b"), ("a", "b", "last")], reentrant=KINDS)
def test_a_block_without_trainable_parameters_is_watched(
    reentrant: bool | None, frozen: tuple[str, ...]
) -> None:
    found: list[Any] = []
    for rules in ([], WATCHING):
        torch.manual_seed(6)
        model = Net(reentrant)
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        trainable = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.05)
        session = attach(model, *rules) if rules else None
        for number in range(3):
            take_step(optimizer, model(data(number, 5, 4)).square().mean())
        found.append(weights_of(model))
        if session is not None:
            assert session.events == []
            for name in ("first.weight", "first.bias"):
                assert steps_of(session, name, rule="norms") == [0, 1, 2]
            # The whole of each block and what is in it, twice the layers around them.
            wanted = {"norms": 3 * len(trainable), "back": 3 * 9, "kept": 3 * 9, "seen": 3 * 9}
            assert fired(session) == wanted
            session.remove()
    assert same(*found)


@pytest.mark.parametrize("how", ["checkpoint", "hooks"])
def test_what_a_loss_has_packed_is_unpacked_by_the_backward_pass_alone(how: str) -> None:
    """The default pack keeps what a loss outside of the model has saved: reading that must not run code of the script."""
    runs: list[str] = []

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        runs.append("forward")
        return (out.exp() - y).square().mean()

    def unpack(tensor: Tensor) -> Tensor:
        runs.append("unpack")
        return tensor

    def packed(out: Tensor, y: Tensor) -> Tensor:
        if how == "checkpoint":
            return checkpoint(criterion, out, y, use_reentrant=False)  # type: ignore[no-any-return]
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            return criterion(out, y)

    def train(*, watched: bool) -> list[str]:
        runs.clear()
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = sgd(model)
        session = gradsurgeon.apply(model, "gradsurgeon:debug@1") if watched else None
        for step in range(2):
            take_step(optimizer, packed(model(data(step, 3, 4)), torch.ones(3, 2)))
        if session is not None:
            session.remove()
        return list(runs)

    plain = train(watched=False)
    assert plain
    assert train(watched=True) == plain
