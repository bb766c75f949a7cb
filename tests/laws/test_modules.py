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
    fields_of,
    linears,
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


class Called(nn.Module):
    """Returns what a function makes of its inputs, given the module."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def returns_input(m: Any, x: Tensor) -> Any:
    """The hooked module returns its input, which a skip path uses as well."""
    h = m.first(x)
    return m.b(m.a(h)) + h


def called_twice(m: Any, x: Tensor) -> Any:
    return m.a(m.a(x).tanh())


def attention(m: Any, x: Tensor) -> Any:
    """Query, key and value are one tensor, and a residual uses it, too."""
    h = m.first(x)[None]
    return m.a(h, h, h, need_weights=False)[0] + h


def rnn(m: Any, x: Tensor) -> Any:
    out, (h, c) = m.a(x[:, None])
    return out.square().sum() + (h * c).sum()


def chain(**layers: nn.Module) -> Any:
    return nn.Sequential(OrderedDict(layers))


def in_place_after() -> Any:
    """An in-place ReLU follows the hooked module."""
    return chain(a=nn.Linear(4, 4), relu=nn.ReLU(inplace=True), b=nn.Linear(4, 2))


def nested() -> Any:
    """Containers return the tensor of their last child."""
    return chain(a=nn.Sequential(nn.Sequential(nn.Linear(4, 4))), b=nn.Softplus())


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def heads() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(4, 2, batch_first=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in-place after": in_place_after,
    "returns its input": lambda: Called(returns_input, first=linear(), a=nn.Identity(), b=linear()),
    "called twice": lambda: Called(called_twice, a=linear()),
    "attention": lambda: Called(attention, first=linear(), a=heads()),
    "rnn": lambda: Called(rnn, a=nn.LSTM(4, 3)),
    "nested": nested,
}


def make(name: str) -> Any:
    torch.manual_seed(5)
    return MODELS[name]()


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
    by_hand = make(name)
    by_rule = make(name)
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
    assert not same(found, run(make(name)))
    assert session.status()["r0"].fired > 0


def test_captures_are_what_a_module_took_and_returned_and_what_came_back() -> None:
    model = make("in-place after")
    seen: list[Tensor] = []
    model.a.register_forward_hook(lambda *call: seen.extend((call[1][0], call[2].clone())))
    entries = [capture("a", tensor) for tensor in ("input", "output", "output.grad")]
    bound = {"action": "clamp", "modules": "a", "tensor": "output.grad", "min": 0}
    with attach(model, *entries, bound, entries[-1]) as session:
        run(model)
    taken, returned, came_back, after = (only(session, rule) for rule in ("r0", "r1", "r2", "r4"))
    assert torch.equal(taken, seen[0])
    # The next layer works in place on what `a` returned; the copy must not change with it.
    assert torch.equal(returned, seen[1])
    # Rules on one tensor act in the order of the file.
    assert came_back.min() < 0
    assert torch.equal(after, came_back.clamp(min=0))
    assert torch.allclose(after.t() @ taken, model.a.weight.grad)


OBSERVING = [
    *(capture("*", tensor) for tensor in ("output", "input", "output.grad")),
    *(
        {"action": action, "modules": "*", "tensor": tensor}
        for action in ("norm-log", "nan-trap")
        for tensor in ("output", "output.grad")
    ),
]


@pytest.mark.parametrize("name", MODELS)
def test_observing_modules_changes_nothing(name: str) -> None:
    observed = make(name)
    with attach(observed, *OBSERVING):
        found = run(observed)
        assert not any(m._backward_hooks or m._backward_pre_hooks for m in observed.modules())
        with torch.no_grad():
            observed(data(1, 5, 4))
        with torch.inference_mode():
            observed(data(1, 5, 4))
    wanted = run(make(name))
    if name == "returns its input":  # there a view separates the module from the skip path
        torch.testing.assert_close(found, wanted)
    else:
        assert same(found, wanted)


# --- what tutorials show --------------------------------------------------------------------------


def test_a_tagged_intermediate_result_without_retain_grad() -> None:
    def steps(x: Tensor) -> Tensor:
        y = gradsurgeon.tag(x + 2, "y")
        return (y * y * 3).mean()

    entry = {"action": "norm-log", "tensors": "y"}
    kept = {"action": "capture", "tensors": "y"}
    model = called(steps)
    x = torch.ones(2, 2, requires_grad=True)
    with attach(model, entry, kept, {**kept, "tensor": "value"}) as session:
        model["m"](x).backward()
        assert session.latest("y") == 9.0
    assert only(session, "r1").tolist() == [[4.5, 4.5], [4.5, 4.5]]
    assert only(session, "r2").tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert gradsurgeon.tag(x, "y") is x


def test_a_tagged_loss_is_scaled_as_by_a_hook_on_it() -> None:
    model: Any = linears(4, 3, 2)
    x = torch.linspace(-1, 1, 8).reshape(2, 4)

    def gradients(mark: Callable[[Tensor], object]) -> list[Tensor]:
        model.zero_grad()
        loss = model(x).square().mean()
        mark(loss)
        loss.backward()
        return [param.grad.clone() for param in model.parameters()]

    by_hand = gradients(lambda loss: loss.register_hook(lambda grad: grad * 0.25))
    with attach(model, {"action": "scale", "tensors": "loss", "factor": 0.25}):
        ruled = gradients(lambda loss: gradsurgeon.tag(loss, "loss"))
    assert all(map(torch.equal, ruled, by_hand))
    assert not torch.equal(ruled[0], gradients(lambda loss: loss)[0])


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


def called(function: Callable[..., Any]) -> nn.ModuleDict:
    return nn.ModuleDict({"m": Called(lambda _, *inputs, **named: function(*inputs, **named))})


@pytest.mark.parametrize("name", STRUCTURES)
def test_one_tensor_of_a_structure_by_path(name: str) -> None:
    build, parts, path = STRUCTURES[name]
    model = called(lambda a, b: build(a * 1, b * 1))
    a: Any = torch.ones(2, requires_grad=True)
    b: Any = torch.ones(2, requires_grad=True)
    of_value = scale("m", f"output{path}", 3.0)
    of_grad = scale("m", f"output{path}.grad", 5.0)
    with attach(model, scale("m", "output", 2.0), of_value, of_grad):
        out = model["m"](a, b)
        left, right = parts(out)
        (left.sum() + right.sum()).backward()
    assert type(out) is type(build(a, b))
    assert (left.tolist(), right.tolist()) == ([2.0, 2.0], [6.0, 6.0])
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
    x = torch.tensor(5.0)
    mask = torch.tensor(5.0)
    bias = torch.tensor(2.0)
    with attach(model, scale("m", tensor, 2.0 if "bias" not in tensor else 7.5)):
        call = model["m"]
        out = call(x=x, mask=mask, bias=bias) if by_keyword else call(x, mask, bias=bias)
    assert out.item() == value


def test_a_module_under_no_grad_while_its_parent_trains() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            wanted = m.teacher(x)
        return (m.student(x) - wanted).square()

    model = Called(forward, teacher=linear(), student=linear())
    plain = copy.deepcopy(model)
    tensors = ("output", "output.grad", "input.grad")
    with attach(model, *[capture("*", tensor) for tensor in tensors]) as session:
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
    model = called(lambda x: ModelOutput(logits=x * 2, hidden=(x * 3,)))
    with attach(model, scale("m", "output.logits", 10.0), scale("m", "output.hidden[0]", 100.0)):
        out: Any = model["m"](torch.ones(1))
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
    def writes(m: Any, x: Tensor) -> Any:
        h = m.a(m.first(x))
        h += 1
        return h

    model = Called(writes, first=linear(), a=nn.Identity())
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
    always = scale("0", "output", 2.0)
    training = scale("0", "output", 3.0, when="train")
    with attach(model, always, training):
        assert model(torch.ones(1)).item() == 6.0
        model.eval()
        assert model(torch.ones(1)).item() == 2.0


def test_observe_mode_edits_no_module_tensor() -> None:
    model = make("returns its input")
    edits = (scale("a", "output"), scale("a", "output.grad"), scale("b", "input.grad"))
    with attach(model, *edits, mode="observe") as session:
        found = run(model)
    torch.testing.assert_close(found, run(make("returns its input")))
    assert [(s.fired, s.changed) for s in session.status().values()] == [(1, 1.0)] * 3


def test_the_root_has_a_name_and_star_does_not_match_it_and_calls_are_counted() -> None:
    model = make("called twice")
    with attach(model, capture(".", "output"), capture("*", "output")) as session:
        model(data(0, 5, 4))
    assert list(session.captured("r0")) == [(".", 0, 0)]
    assert list(session.captured("r1")) == [("a", 0, 0), ("a", 0, 1)]


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
            take_step(optimizer, model["used"](torch.ones(1, 2)).sum())


# --- traps ----------------------------------------------------------------------------------------


def trap(tensor: str, **more: Any) -> Json:
    return {"action": "nan-trap", "modules": "*", "tensor": tensor, **more}


def test_a_trap_on_outputs_names_the_first_module() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = sgd(model)
    with torch.no_grad():
        model[1].weight[0, 0] = NAN
    before = weights_of(model)
    with attach(model, trap("output")), pytest.raises(NonFiniteGradientError) as e:
        take_step(optimizer, model(data(0, 5, 4)).sum())
    assert (e.value.name, e.value.step, e.value.rule) == ("1", 0, "r0")
    assert str(e.value).splitlines()[0] == "step 0, rule r0: 3 of 4 tensors are not finite"
    assert "the first non-finite one is the output of 1" in str(e.value)
    torch.testing.assert_close(before, weights_of(model), rtol=0, atol=0, equal_nan=True)


def test_a_validation_forward_that_feeds_no_update_is_no_trap() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = sgd(model)
    with attach(model, trap("output")) as session:
        with torch.no_grad():
            model(torch.full((1, 4), NAN))
        model(torch.full((1, 4), NAN))  # with a graph, but nobody goes back through it
        take_step(optimizer, model(data(0, 5, 4)).sum())
    assert fields_of(session, "kind", "name") == [("notice", "0"), ("notice", "0")]
    assert "in a forward pass that fed no update: the trap ignored it" in session.events[0].message


# --- what must not pile up, and what must not get lost --------------------------------------------


def hooks_on_tensors() -> int:
    gc.collect()
    return sum(type(one).__name__ == "GradHook" for one in gc.get_objects())


def test_forwards_that_no_backward_follows_leave_nothing() -> None:
    model = make("in-place after")
    with attach(model, scale("*", "output.grad")):
        kept = [model(data(0, 5, 4)) for _ in range(20)]
        assert hooks_on_tensors() >= 20
        del kept
        assert hooks_on_tensors() == 0
        run(model)
        assert hooks_on_tensors() == 0


def test_an_input_written_in_place_is_told_of_at_the_step_of_its_own_optimizer() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "other": nn.Linear(4, 1)})
    mine = sgd(model["a"])
    others = sgd(model["other"])
    held: list[Tensor] = []

    def write(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        held.append(args[0].add_(1))

    with attach(model, scale("a", "input.grad")) as session:
        mine.step()
        others.step()
        model["a"].register_forward_pre_hook(write)
        model["a"](data(0, 5, 4).requires_grad_() * 1).sum().backward()
        others.step()
        assert session.events == []
        with pytest.warns(GradSurgeonWarning, match="rule r0: a was written in place"):
            mine.step()


def returns_parameter() -> Any:
    """The hooked module returns its parameter, which outlives every graph."""
    torch.manual_seed(5)
    holder = Called(lambda m, _: m.held)
    holder.register_parameter("held", nn.Parameter(torch.ones(2)))
    return chain(a=holder, b=nn.Linear(2, 1))


def test_a_rule_on_the_output_of_a_module_that_returns_its_parameter_acts_once() -> None:
    model = returns_parameter()
    plain = returns_parameter()
    plain(None).sum().backward()
    with attach(model, scale("a", "output.grad")) as session:
        for _ in range(3):
            model(None)
        model(None).sum().backward()
    assert session.status()["r0"].fired == 1
    assert torch.equal(model.a.held.grad, plain.a.held.grad * 0.5)
    assert not model.a.held._backward_hooks


def test_a_trap_on_a_returned_parameter_leaves_no_hook_on_it() -> None:
    model = returns_parameter()
    optimizer = sgd(model)
    with attach(model, {**trap("output"), "modules": "a"}):
        for _ in range(3):
            model(None)
        assert not model.a.held._backward_hooks
        with torch.no_grad():
            model.a.held[0] = math.nan
        model(None).sum().backward()
        with pytest.raises(NonFiniteGradientError, match="r0"):
            optimizer.step()


def test_a_rule_on_a_tag_acts_once_on_a_leaf_however_often_it_is_tagged() -> None:
    entry = {"action": "scale", "tensors": "x", "factor": 0.5}
    x: Any = torch.ones(2, requires_grad=True)
    model = nn.Identity()
    with attach(model, entry):
        for _ in range(3):
            assert torch.equal(gradsurgeon.tag(x, "x"), x)
        (gradsurgeon.tag(x, "x") * 4).sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]
    (gradsurgeon.tag(x, "x") * 4).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]
    assert not x._backward_hooks


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(
    ("tensor", "place", "wrong"),
    [("output", 3, ("3", "37 of 40")), ("output.grad", 36, ("35", "36 of 40"))],
)
def test_a_trap_misses_nothing_in_a_model_of_many_modules(
    tensor: str, place: int, wrong: tuple[str, str], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trap_effects, "_MOST_FLAGS", 8)
    model: Any = linears(*[2] * 41)
    optimizer = sgd(model)
    with torch.no_grad():
        model[place].weight[0, 0] = NAN
    name, number = wrong
    # Flags of one tensor in several passes may have become one.
    text = f"{number if passes == 1 else 'of '}.*tensors are not finite"
    with attach(model, trap(tensor, then="warn")) as session:
        for batch in range(passes):
            model(data(batch, 5, 2)).nan_to_num().sum().backward()
            with torch.no_grad():
                model(data(batch, 5, 2))
        with pytest.warns(GradSurgeonWarning, match=text):
            optimizer.step()
        assert fields_of(session, "name", kind="trap") == [name]


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
    threads = 8
    calls = 40
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
    x = data(0, 3, 4)
    wanted = model(x)
    with attach(model, rule) as session:
        with pytest.warns(
            GradSurgeonWarning, match="rule r0: left a tensor alone that has no numbers"
        ):
            if how == "export":
                made = torch.export.export(model, (x,)).module()
            else:
                model.to("meta")(torch.empty(3, 4, device="meta"))
        assert [event.message[:19] for event in session.events] == ["left a tensor alone"]
        assert session.status()["r0"].fired == 0
        if how == "export":
            assert torch.equal(made(x), wanted)
            # What the session does with real tensors is as it was.
            model(x)
            assert session.status()["r0"].fired == 1
            if rule["action"] == "norm-log":
                assert math.isfinite(session.latest("0"))


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.:FutureWarning")  # since torch 2.14
def test_a_copy_can_be_scripted_and_traced(request: pytest.FixtureRequest) -> None:
    # A model like this one that is compiled here must not be told of when rules come onto another.
    request.addfinalizer(torch.compiler.reset)
    model = make("in-place after")
    x = data(0, 5, 4)
    wanted = model(x)
    with attach(model, *OBSERVING):
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


@pytest.mark.parametrize("then", ["skip-step", "raise"])
@pytest.mark.parametrize(
    ("modules", "tensor", "frozen"),
    [
        ("0", "input", False),
        (".", "input", False),
        ("0", "output", True),
        ("0", "output.grad", False),
    ],
)
def test_a_trap_stops_the_update_also_by_a_value_that_needs_no_gradient(
    then: str, modules: str, tensor: str, frozen: bool
) -> None:
    model = tanh_net(4, 4, 2)
    model[0].requires_grad_(not frozen)
    optimizer = sgd(model[2])
    bad = data(1, 3, 4)
    bad[0, 0] = NAN
    with attach(model, {**trap(tensor, then=then), "modules": modules}) as session:
        for x in (data(0, 3, 4), bad, data(2, 3, 4)):
            with torch.no_grad():
                model(bad)  # feeds nothing
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if x is bad and then == "raise":
                with pytest.raises(NonFiniteGradientError):
                    optimizer.step()
                model.zero_grad()
                break
            optimizer.step()
        assert fields_of(session, "step", "name", kind="trap") == [(1, modules)]
    assert all(param.isfinite().all() for param in model.parameters())
