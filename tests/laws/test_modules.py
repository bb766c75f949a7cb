"""Rules on module tensors: the same numbers as hooks written by hand, in models that break hooks."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from models import data
from pairs import pairwise
from ranks import Json
from small import (
    attach,
    equal,
    events_of,
    fields_of,
    linears,
    rule_file,
    sgd,
    take_step,
    tanh_net,
    weights_of,
)
from torch import Tensor, nn
from two_heads import grads_of, same

import gradsurgeon
from gradsurgeon import GradSurgeonWarning, NonFiniteGradientError
from gradsurgeon.runtime import trap_effects

NAN = float("nan")


def capture(modules: str, tensor: str, **more: Any) -> Json:
    return {"action": "capture", "modules": modules, "tensor": tensor, **more}


def scale(modules: str, tensor: str, factor: float = 0.5, **more: Any) -> Json:
    entry = {"action": "scale", "modules": modules, "tensor": tensor, "factor": factor}
    return {**entry, **more}


def only(session: gradsurgeon.Session, rule: str = "r0") -> Tensor:
    (found,) = session.captured(rule).values()
    return found


# --- models that break hooks ----------------------------------------------------------------------


class InPlaceAfter(nn.Module):
    """An in-place ReLU follows the hooked module."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.b = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.relu(self.a(x)))


class ReturnsInput(nn.Module):
    """The hooked module returns its input, which a skip path uses as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.a = nn.Identity()
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return self.b(self.a(h)) + h


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.a(self.a(x).tanh())


class TwoConsumers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.b(h) * h


class Attention(nn.Module):
    """Query, key and value are one tensor, and a residual uses it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.a = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)[None]
        return self.a(h, h, h, need_weights=False)[0] + h


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.LSTM(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.a(x[:, None])
        return out.square().sum() + (h * c).sum()  # type: ignore[no-any-return]


class Nested(nn.Module):
    """Containers that return the tensor of their last child."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))

    def forward(self, x: Tensor) -> Any:
        return self.a(x).square()


MODELS: dict[str, type[nn.Module]] = {
    "in-place after": InPlaceAfter,
    "returns its input": ReturnsInput,
    "called twice": CalledTwice,
    "two consumers": TwoConsumers,
    "attention": Attention,
    "rnn": Rnn,
    "nested": Nested,
}


def make(kind: type[nn.Module]) -> Any:
    torch.manual_seed(5)
    return kind()


def run(model: nn.Module) -> dict[str, Tensor]:
    model(data(0, 5, 4)).square().sum().backward()
    return grads_of(model)


class Halve(torch.autograd.Function):
    """An identity whose gradient is half: what a rule does, with nothing but autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        return grad[0] * 0.5


def halved(value: Any, tensor: str) -> Any:
    """Return a structure with half of each tensor, or of its gradient; one tensor in several places stays one."""
    known: dict[int, Tensor] = {}

    def half(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple([half(item) for item in part])
        if not isinstance(part, Tensor):
            return part
        if id(part) not in known:
            known[id(part)] = Halve.apply(part) if tensor.endswith("grad") else part * 0.5
        return known[id(part)]

    return half(value)


@pairwise(tensor=["output", "input", "output.grad", "input.grad"], name=MODELS)
def test_scaled_tensors_equal_hooks_written_by_hand(tensor: str, name: str) -> None:
    by_hand, by_rule = make(MODELS[name]), make(MODELS[name])
    if tensor.startswith("output"):
        by_hand.a.register_forward_hook(lambda *call: halved(call[2], tensor))
    else:
        by_hand.a.register_forward_pre_hook(lambda *call: halved(call[1], tensor))
    with attach(by_rule, scale("a", tensor)) as session:
        found = run(by_rule)
    wanted = run(by_hand)
    if tensor == "input.grad":
        # The view can regroup a sum, so the last bit may differ; half of it would not.
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        return
    assert same(found, wanted)
    assert not same(found, run(make(MODELS[name])))
    assert session.status()["r0"].fired > 0


def test_captures_are_what_a_module_took_and_returned_and_what_came_back() -> None:
    model = make(InPlaceAfter)
    seen: list[Tensor] = []
    model.a.register_forward_hook(lambda *call: seen.extend((call[1][0], call[2].clone())))
    entries = [capture("a", tensor) for tensor in ("input", "output", "output.grad")]
    with attach(model, *entries) as session:
        run(model)
    taken, returned, came_back = (only(session, rule) for rule in ("r0", "r1", "r2"))
    assert torch.equal(taken, seen[0])
    # The next layer works in place on what `a` returned; the copy must not change with it.
    assert torch.equal(returned, seen[1])
    assert torch.allclose(came_back.t() @ taken, model.a.weight.grad)


def test_rules_on_one_tensor_act_in_the_order_of_the_file() -> None:
    model = make(TwoConsumers)
    bound = {"action": "clamp", "modules": "a", "tensor": "output.grad", "min": 0}
    seen = capture("a", "output.grad")
    with attach(model, seen, bound, seen) as session:
        run(model)
    before, after = only(session, "r0"), only(session, "r2")
    assert before.min() < 0
    assert torch.equal(after, before.clamp(min=0))


OBSERVING = rule_file(
    capture("*", "output"),
    capture("*", "input"),
    capture("*", "output.grad"),
    {"action": "norm-log", "modules": "*", "tensor": "output"},
    {"action": "norm-log", "modules": "*", "tensor": "output.grad"},
    {"action": "nan-trap", "modules": "*", "tensor": "output"},
    {"action": "nan-trap", "modules": "*", "tensor": "output.grad"},
)


@pytest.mark.parametrize("name", MODELS)
def test_observing_modules_changes_nothing(name: str) -> None:
    observed, plain = make(MODELS[name]), make(MODELS[name])
    with gradsurgeon.apply(observed, OBSERVING):
        found = run(observed)
        assert not any(m._backward_hooks or m._backward_pre_hooks for m in observed.modules())
        with torch.no_grad():
            observed(data(1, 5, 4))
        with torch.inference_mode():
            observed(data(1, 5, 4))
    wanted = run(plain)
    for key, grad in wanted.items():
        exact = name != "returns its input"  # there a view separates the module from the skip path
        assert torch.equal(found[key], grad) if exact else torch.allclose(found[key], grad), key


# --- what tutorials show --------------------------------------------------------------------------


def test_a_tagged_intermediate_result_without_retain_grad() -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = gradsurgeon.tag(x + 2, "y")
            return (y * y * 3).mean()

    entry = {"action": "norm-log", "tensors": "y"}
    kept = {"action": "capture", "tensors": "y"}
    value = {"action": "capture", "tensors": "y", "tensor": "value"}
    model = Steps()
    with attach(model, entry, kept, value) as session:
        model(torch.ones(2, 2, requires_grad=True)).backward()
        assert session.latest("y") == 9.0
    assert only(session, "r1").tolist() == [[4.5, 4.5], [4.5, 4.5]]
    assert only(session, "r2").tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_a_tag_without_session_is_the_tensor_itself() -> None:
    x = torch.ones(2)
    assert gradsurgeon.tag(x, "y") is x


# --- structures -----------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Box:
    left: Tensor
    right: Tensor


STRUCTURES: dict[
    str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], list[Tensor]], str]
] = {
    "tuple": (lambda a, b: (a, b), list, "[1]"),
    "list": (lambda a, b: [a, b], list, "[1]"),
    "named tuple by name": (Pair, list, ".right"),
    "named tuple by index": (Pair, list, "[1]"),
    "dict": (lambda a, b: {"left": a, "right": b}, lambda v: list(v.values()), ".right"),
    "dict by index": (lambda a, b: {"left": a, "right": b}, lambda v: list(v.values()), "[1]"),
    "dataclass": (Box, lambda v: [v.left, v.right], ".right"),
    "nested": (lambda a, b: (a, {"deep": [b]}), lambda v: [v[0], v[1]["deep"][0]], "[1].deep[0]"),
}


class Structured(nn.Module):
    def __init__(self, build: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.build = build

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.build(a * 1, b * 1)


@pytest.mark.parametrize("name", STRUCTURES)
def test_one_tensor_of_a_structure_by_path(name: str) -> None:
    build, parts, path = STRUCTURES[name]
    model = nn.ModuleDict({"m": Structured(build)})
    a = torch.ones(2, requires_grad=True)
    b = torch.ones(2, requires_grad=True)
    every = scale("m", "output", 2.0)
    one = rule_file(every, scale("m", f"output{path}", 3.0), scale("m", f"output{path}.grad", 5.0))
    with gradsurgeon.apply(model, one):
        out = model["m"](a, b)
        left, right = parts(out)
        (left.sum() + right.sum()).backward()
    assert type(out) is type(build(a, b))
    assert (left.tolist(), right.tolist()) == ([2.0, 2.0], [6.0, 6.0])
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.tolist(), b.grad.tolist()) == ([2.0, 2.0], [30.0, 30.0])


class Keywords(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, bias: Tensor) -> Tensor:
        return x * (1 if mask is None else mask) + bias


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("input[1]", 52.0),
        ("input.mask", 52.0),
        ("input.x", 52.0),
        ("input[0]", 52.0),
        ("input.bias", 40.0),
    ],
)
@pytest.mark.parametrize("by_keyword", [True, False])
def test_inputs_by_position_and_by_name(tensor: str, value: float, by_keyword: bool) -> None:
    model = nn.ModuleDict({"m": Keywords()})
    x, mask, bias = torch.tensor(5.0), torch.tensor(5.0), torch.tensor(2.0)
    with attach(model, scale("m", tensor, 2.0 if "bias" not in tensor else 7.5)):
        call = model["m"]
        out = call(x=x, mask=mask, bias=bias) if by_keyword else call(x, mask, bias=bias)
    assert out.item() == value


def test_a_module_under_no_grad_while_its_parent_trains() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(4, 4)
            self.student = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                wanted = self.teacher(x)
            return (self.student(x) - wanted).square()

    plain, model = make(Teacher), make(Teacher)
    observing = rule_file(
        capture("*", "output"), capture("*", "output.grad"), capture("*", "input.grad")
    )
    with gradsurgeon.apply(model, observing) as session:
        found = run(model)
    assert same(found, run(plain))
    assert {name for name, _, _ in session.captured("r0")} == {"teacher", "student"}
    assert {name for name, _, _ in session.captured("r1")} == {"student"}
    assert session.captured("r2") == {}


class ModelOutput(OrderedDict[str, Any]):
    """As Hugging Face has it: an ordered mapping whose values are attributes as well."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def test_a_mapping_with_attributes_keeps_both_in_step() -> None:
    class Lm(nn.Module):
        def forward(self, x: Tensor) -> ModelOutput:
            return ModelOutput(logits=x * 2, hidden=(x * 3,))

    model = nn.ModuleDict({"lm": Lm()})
    both = rule_file(scale("lm", "output.logits", 10.0), scale("lm", "output.hidden[0]", 100.0))
    with gradsurgeon.apply(model, both):
        out: Any = model["lm"](torch.ones(1))
    assert out.__class__.__name__ == "ModelOutput"
    assert out["logits"].item() == out.logits.item() == 20.0
    assert out["hidden"][0].item() == out.hidden[0].item() == 300.0


def test_ids_and_masks_are_left_alone() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(5, 2)})
    with attach(model, scale("emb", "input", 0.5), capture("emb", "input")) as s:
        model["emb"](torch.tensor([3, 4]))
    assert only(s, "r1").tolist() == [3, 4]


def test_a_path_that_leads_nowhere_is_a_warning_with_what_is_there() -> None:
    model = nn.ModuleDict({"m": nn.LSTM(4, 3)})
    with (
        attach(model, scale("m", "output[2]")),
        pytest.warns(
            GradSurgeonWarning,
            match=r"rule r0: m has no output\[2\]: its output is a tuple with \[0\], \[1\]",
        ),
    ):
        model["m"](data(0, 5, 1, 4))


def test_an_output_written_in_place_behind_a_view_is_a_warning() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.a = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.a(self.first(x))
            h += 1
            return h

    model = Writes()
    optimizer = sgd(model)
    with (
        attach(model, scale("a", "output.grad")),
        pytest.warns(
            GradSurgeonWarning, match="rule r0: a was written in place by the next operation"
        ),
    ):
        kept = model(data(0, 5, 4))
        kept.sum().backward()
        optimizer.step()


# --- what edits act on, and when ------------------------------------------------------------------


def test_edits_of_values_act_in_evaluation_unless_told_otherwise() -> None:
    model = nn.Sequential(nn.Identity())
    always, training = scale("0", "output", 2.0), scale("0", "output", 3.0, when="train")
    with attach(model, always, training):
        assert model(torch.ones(1)).item() == 6.0
        model.eval()
        assert model(torch.ones(1)).item() == 2.0


def test_observe_mode_edits_no_module_tensor() -> None:
    plain, model = make(TwoConsumers), make(TwoConsumers)
    both = rule_file(scale("a", "output"), scale("a", "output.grad"), scale("b", "input.grad"))
    with gradsurgeon.apply(model, both, mode="observe") as session:
        found = run(model)
    assert all(torch.allclose(found[key], grad) for key, grad in run(plain).items())
    assert [s.fired for s in session.status().values()] == [1, 1, 1]
    assert [s.changed for s in session.status().values()] == [1.0, 1.0, 1.0]


def test_the_root_has_a_name_and_star_does_not_match_it() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with attach(model, capture(".", "output"), capture("*", "output")) as session:
        model(torch.ones(1))
    assert list(session.captured("r0")) == [(".", 0, 0)]
    assert list(session.captured("r1")) == [("0", 0, 0), ("1", 0, 0)]


def test_captures_count_the_calls_of_a_step() -> None:
    model = make(CalledTwice)
    with attach(model, capture("a", "output")) as session:
        model(data(0, 5, 4))
        assert list(session.captured("r0")) == [("a", 0, 0), ("a", 0, 1)]


def test_captures_are_bounded() -> None:
    model = nn.Sequential(nn.Identity())
    with attach(model, capture("0", "output", max_bytes=100)) as session:
        for number in range(5):
            model(torch.full((10,), float(number)))
    captured = session.captured("r0")
    assert list(captured) == [("0", 0, 3), ("0", 0, 4)]
    assert [tensor[0].item() for tensor in captured.values()] == [3.0, 4.0]
    (event,) = session.events
    assert (event.kind, event.rule) == ("notice", "r0")
    assert "exceed 100 bytes" in event.message
    with pytest.raises(KeyError, match="no capture rule 'r1'; there are: r0"):
        session.captured("r1")


def test_a_module_rule_that_never_fires_says_why() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    optimizer = sgd(model)
    with (
        attach(model, capture("idle", "output"), capture("used", "output")),
        pytest.warns(
            GradSurgeonWarning, match="rule r0: .* no forward pass went through any module"
        ),
    ):
        for _ in range(3):
            model["used"](torch.ones(1, 2)).sum().backward()
            optimizer.step()


# --- traps ----------------------------------------------------------------------------------------


def trap(**more: Any) -> Json:
    return rule_file({"action": "nan-trap", "modules": "*", **more})


def test_a_trap_on_outputs_names_the_first_module() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = sgd(model)
    with torch.no_grad():
        model[1].weight[0, 0] = NAN
    before = weights_of(model)
    with (
        gradsurgeon.apply(model, trap(tensor="output")),
        pytest.raises(NonFiniteGradientError) as e,
    ):
        model(data(0, 5, 4)).sum().backward()
        optimizer.step()
    assert (e.value.name, e.value.step, e.value.rule) == ("1", 0, "r0")
    assert str(e.value).splitlines()[0] == "step 0, rule r0: 3 of 4 tensors are not finite"
    assert "the first non-finite one is the output of 1" in str(e.value)
    after = list(model.parameters())
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)
    )


def test_a_validation_forward_that_feeds_no_update_is_no_trap() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = sgd(model)
    with gradsurgeon.apply(model, trap(tensor="output")) as session:
        with torch.no_grad():
            model(torch.full((1, 4), NAN))
        model(torch.full((1, 4), NAN))  # with a graph, but nobody goes back through it
        model(data(0, 5, 4)).sum().backward()
        optimizer.step()
    assert fields_of(session, "kind", "name") == [("notice", "0"), ("notice", "0")]
    assert "in a forward pass that fed no update: the trap ignored it" in session.events[0].message


def test_a_trap_on_output_gradients_skips_the_step() -> None:
    model: Any = linears(4, 4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    skip = trap(tensor="output.grad", then="skip-step")
    with gradsurgeon.apply(model, skip) as session:
        model(data(0, 5, 4)).sum().backward()
        optimizer.step()
        before = weights_of(model)
        take_step(optimizer, (model(data(0, 5, 4)) * NAN).sum())
        assert equal(before, model.parameters())
        take_step(optimizer, model(data(0, 5, 4)).sum())
        assert not torch.equal(before[0], model[0].weight)
    assert fields_of(session, "kind", "step", "name") == [
        ("trap", 1, "1"),
        ("skipped-step", 1, "1"),
    ]


# --- nothing stays --------------------------------------------------------------------------------


# --- what must not pile up, and what must not get lost --------------------------------------------


def hooks_on_tensors() -> int:
    gc.collect()
    return sum(type(one).__name__ == "GradHook" for one in gc.get_objects())


def test_forwards_that_no_backward_follows_leave_nothing() -> None:
    model = make(InPlaceAfter)
    x = data(0, 5, 4)
    with attach(model, scale("*", "output.grad")):
        kept = [model(x) for _ in range(20)]
        assert hooks_on_tensors() >= 20
        del kept
        assert hooks_on_tensors() == 0
        run(model)
        assert hooks_on_tensors() == 0


def test_an_input_written_in_place_is_told_of_at_the_step_of_its_own_optimizer() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "other": nn.Linear(4, 1)})
    mine, others = sgd(model["a"]), sgd(model["other"])
    held: list[Tensor] = []

    def write(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        held.append(args[0].add_(1))

    with attach(model, scale("a", "input.grad")) as session:
        for optimizer in (mine, others):
            optimizer.step()
        model["a"].register_forward_pre_hook(write)
        model["a"](data(0, 5, 4).requires_grad_() * 1).sum().backward()
        others.step()
        assert session.events == []
        with pytest.warns(GradSurgeonWarning, match="rule r0: a was written in place"):
            mine.step()


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Parameter(torch.ones(2))

    def forward(self) -> Tensor:
        return self.held


class ReturnsParameter(nn.Module):
    """The hooked module returns its parameter, which outlives every graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Holder()
        self.b = nn.Linear(2, 1)

    def forward(self) -> Any:
        return self.b(self.a())


def test_a_rule_on_the_output_of_a_module_that_returns_its_parameter_acts_once() -> None:
    model, plain = make(ReturnsParameter), make(ReturnsParameter)
    plain().sum().backward()
    with attach(model, scale("a", "output.grad")) as session:
        for _ in range(3):
            model()
        model().sum().backward()
    assert session.status()["r0"].fired == 1
    assert torch.equal(model.a.held.grad, plain.a.held.grad * 0.5)
    assert not model.a.held._backward_hooks


def test_a_trap_on_a_returned_parameter_leaves_no_hook_on_it() -> None:
    model = make(ReturnsParameter)
    trap = {"action": "nan-trap", "modules": "a", "tensor": "output"}
    optimizer = sgd(model)
    with attach(model, trap):
        for _ in range(3):
            model()
        assert not model.a.held._backward_hooks
        with torch.no_grad():
            model.a.held[0] = math.nan
        model().sum().backward()
        with pytest.raises(NonFiniteGradientError, match="r0"):
            optimizer.step()


def test_a_rule_on_a_tag_acts_once_on_a_leaf_however_often_it_is_tagged() -> None:
    entry = {"action": "scale", "tensors": "x", "factor": 0.5}
    model = nn.Identity()
    x = torch.ones(2, requires_grad=True)
    with attach(model, entry):
        for _ in range(3):
            assert torch.equal(gradsurgeon.tag(x, "x"), x)
        (gradsurgeon.tag(x, "x") * 4).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 2.0]
    (gradsurgeon.tag(x, "x") * 4).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]
    assert not x._backward_hooks


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("tensor", ["output", "output.grad"])
def test_a_trap_misses_nothing_in_a_model_of_many_modules(
    tensor: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trap_effects, "_MOST_FLAGS", 8)
    model: Any = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    optimizer = sgd(model)
    place = 3 if tensor == "output" else 36
    with torch.no_grad():
        model[place].weight[0, 0] = NAN
    # Flags of one tensor in several passes may have become one.
    wrong = f"{40 - place if tensor == 'output' else place} of 40" if passes == 1 else "of "
    with gradsurgeon.apply(model, trap(tensor=tensor, then="warn")) as session:
        for number in range(passes):
            (model(data(number, 5, 2)).nan_to_num()).sum().backward()
            with torch.no_grad():
                model(data(number, 5, 2))
        with pytest.warns(GradSurgeonWarning, match=f"{wrong}.*tensors are not finite"):
            optimizer.step()
        (event,) = events_of(session, "trap")
        assert event.name == str(place if tensor == "output" else place - 1)


@pytest.mark.slow
def test_threads_that_share_a_model_lose_no_count(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    model = tanh_net(4, 4, 2)
    entries = (
        capture("*", "output", max_bytes=10**9),
        {"action": "norm-log", "modules": "*", "tensor": "output.grad", "stats": ["l2", "mean"]},
        scale("*", "output.grad", 1.0),
    )
    threads, calls = 8, 40
    with attach(model, *entries) as session:

        def work(number: int) -> None:
            for _ in range(calls):
                torch.autograd.grad(model(data(number, 3, 4)).sum(), list(model.parameters()))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        wanted = threads * calls * 3
        assert [one.fired for one in session.status().values()] == [wanted] * 3
        assert len(session.captured("r0")) == wanted
        for stat in ("l2", "mean"):
            assert len(session.history("0", stat)) == threads * calls


LOGGED = {"action": "norm-log", "modules": "0", "tensor": "output"}


@pytest.mark.parametrize("rule", [scale("0", "output"), capture("0", "output"), LOGGED])
@pytest.mark.parametrize("how", ["meta", "export"])
def test_tensors_without_numbers_are_left_alone(
    how: str, rule: Json, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(torch.compiler.reset)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    wanted = model(data(0, 3, 4))
    with attach(model, rule) as session:
        with pytest.warns(
            GradSurgeonWarning, match="rule r0: left a tensor alone that has no numbers"
        ):
            if how == "export":
                made = torch.export.export(model, (data(0, 3, 4),)).module()
            else:
                model.to("meta")(torch.empty(3, 4, device="meta"))
        assert [event.message[:19] for event in session.events] == ["left a tensor alone"]
        assert session.status()["r0"].fired == 0
        if how == "export":
            assert torch.equal(made(data(0, 3, 4)), wanted)
            # What the session does with real tensors is as it was.
            model(data(0, 3, 4))
            assert session.status()["r0"].fired == 1
            if rule["action"] == "norm-log":
                assert math.isfinite(session.latest("0"))


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.:FutureWarning")  # since torch 2.14
def test_a_copy_can_be_scripted_and_traced(request: pytest.FixtureRequest) -> None:
    # A model like this one that is compiled here must not be told of when rules come onto another.
    request.addfinalizer(torch.compiler.reset)
    model = make(InPlaceAfter)
    x = data(0, 5, 4)
    wanted = model(x)
    with gradsurgeon.apply(model, OBSERVING):
        assert torch.equal(torch.jit.script(copy.deepcopy(model))(x), wanted)
        assert torch.equal(torch.jit.trace(copy.deepcopy(model), x)(x), wanted)
        assert torch.equal(torch.compile(copy.deepcopy(model), backend="eager")(x), wanted)


def test_a_module_that_is_replaced_without_a_registration_is_told_of_in_the_end() -> None:
    model = tanh_net(4, 4, 2)
    optimizer = sgd(model[0])
    with attach(model, capture("1", "output")) as session:
        for step in range(3):
            if step == 1:
                model._modules["1"] = nn.Tanh()
            model(data(step, 3, 4)).sum().backward()
            optimizer.step()
        assert [step for _, step, _ in session.captured("r0")] == [0]
    (event,) = session.events
    assert (event.kind, event.name) == ("hook-lost", "1")
    assert "was replaced or removed: no rule acted on it since then" in event.message


def nan_at(step: int, number: int) -> Tensor:
    x = data(number, 3, 4)
    if number == step:
        x[0, 0] = float("nan")
    return x


@pytest.mark.parametrize("then", ["skip-step", "raise"])
@pytest.mark.parametrize(
    ("modules", "tensor", "frozen"),
    [("0", "input", False), (".", "input", False), ("0", "output", True)],
)
def test_a_trap_on_a_value_that_needs_no_gradient_stops_the_update(
    then: str, modules: str, tensor: str, frozen: bool
) -> None:
    model = tanh_net(4, 4, 2)
    model[0].requires_grad_(not frozen)
    optimizer = sgd(model[2])
    rule = {"id": "t", "action": "nan-trap", "modules": modules, "tensor": tensor, "then": then}
    with attach(model, rule) as session:
        for number in range(3):
            with torch.no_grad():
                model(nan_at(0, 0))  # feeds nothing
            optimizer.zero_grad()
            model(nan_at(1, number)).square().mean().backward()
            if number == 1 and then == "raise":
                with pytest.raises(NonFiniteGradientError):
                    optimizer.step()
                model.zero_grad()
                break
            optimizer.step()
        assert fields_of(session, "step", kind="trap") == [1]
    assert all(param.isfinite().all() for param in model.parameters())
