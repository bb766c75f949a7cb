"""`gradsurgeon.backward`: what arrives is what the methods say, and without a rule it is the plain sum."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from pairs import singly
from ranks import Json
from several_losses import (
    OPTIONS,
    TRUNKS,
    Heads,
    Losses,
    Overlapping,
    TwiceUsed,
    aggregator,
    applied,
    drawing,
    flat_grads,
    heads,
    jacobian,
    rules,
    three,
    trunk_of,
    two,
)
from small import equal, fields_of, fired, hold_rows, messages, sgd, steps_of, weights_of
from torch import Tensor, nn
from two_heads import grads_of, same

import gradsurgeon
from gradsurgeon import GradSurgeonWarning
from gradsurgeon.actions._methods import METHODS
from gradsurgeon.tensors import inner_products

MODELS: dict[str, tuple[Callable[[], nn.Module], Losses]] = {
    "heads": (Heads, two),
    "overlapping": (Overlapping, three),
    "twice used": (TwiceUsed, two),
}

MGDA = {"action": "combine", "method": "mgda"}

pytestmark = pytest.mark.usefixtures("doubles")


def combined(model: nn.Module, x: Tensor) -> None:
    """Combine both losses by MGDA."""
    applied(model, MGDA)
    gradsurgeon.backward(two(model, x))


def of_torchjd(method: str, model: nn.Module, x: Tensor) -> Tensor:
    """Return what TorchJD makes of the gradients of both losses on the trunk."""
    combined: Tensor = aggregator(method)(jacobian(two(model, x), trunk_of(model)))
    return combined


def check(model: nn.Module, wanted: Tensor) -> None:
    """Hold the gradients of the trunk against others."""
    torch.testing.assert_close(flat_grads(trunk_of(model)), wanted, rtol=1e-9, atol=1e-12)


@singly(model_name=["overlapping", "heads", "twice used"], method=METHODS)
def test_each_method_equals_the_aggregator_of_torchjd(method: str, model_name: str) -> None:
    make, losses_of = MODELS[model_name]
    model, x = make(), torch.randn(5, 6)
    names = list(losses_of(model, x))
    matrix = jacobian(losses_of(model, x), trunk_of(model))
    assert (matrix @ matrix.T).min() < 0
    with drawing():
        wanted = aggregator(method)(matrix)
    options = OPTIONS.get(method, {})
    rule = {"action": "combine", "losses": names, "method": method, **options}
    with applied(model, rule) as session:
        gradsurgeon.backward(losses_of(model, x))
        assert session.status()["combine"].fired == 1
    check(model, wanted)


def plainly(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """Return a copy that has gone through the plain sum, and the random state it leaves; the state itself stays."""
    other = copy.deepcopy(model)
    before = torch.get_rng_state()
    first, second = two(other, x).values()
    (first + second).backward()
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    return other, after


@pytest.mark.filterwarnings("ignore:.*no loss is called:gradsurgeon.GradSurgeonWarning")
@singly(trunk=TRUNKS, armed=["nothing", "conflict", "observed", "other losses", "paused"])
def test_nothing_changes_without_a_rule_that_combines(trunk: str, armed: str) -> None:
    model, x = Heads(TRUNKS[trunk]()), torch.randn(5, 6)
    other, after = plainly(model, x)
    rule: Json = {"action": "combine", "method": "pcgrad", "id": "rule"}
    if armed == "conflict":
        rule = {"action": "conflict", "id": "rule"}
    elif armed == "other losses":
        rule["losses"] = ["a", "b"]
    session = applied(model, rule, mode="observe" if armed == "observed" else "act")
    if armed == "paused":
        session.pause()
    elif armed == "nothing":
        session.remove()
    gradsurgeon.backward(two(model, x))
    assert same(grads_of(model), grads_of(other))
    assert torch.equal(torch.get_rng_state(), after)
    assert equal(model.buffers(), other.buffers())
    assert session.status()["rule"].fired == (armed in ("conflict", "observed"))


@pytest.mark.parametrize("trunk", TRUNKS)
def test_only_matched_parameters_get_anything_else(trunk: str) -> None:
    model, x = Heads(TRUNKS[trunk]()), torch.randn(5, 6)
    other, _ = plainly(model, x)
    again = copy.deepcopy(model)
    state = torch.get_rng_state()
    wanted = aggregator("mgda")(jacobian(two(again, x), trunk_of(again)))
    torch.set_rng_state(state)
    combined(model, x)
    for head in ("seg", "depth"):
        assert same(grads_of(model.get_submodule(head)), grads_of(other.get_submodule(head)))
    check(model, wanted)
    assert equal(model.buffers(), other.buffers())


@pytest.mark.parametrize("per", ["rule", "parameter", "module"])
def test_a_conflict_is_recorded_of_each_part(per: str) -> None:
    model, x = heads()
    session = applied(model, {"action": "conflict", "per": per})
    gradsurgeon.backward(two(model, x))
    parts: dict[str, list[Tensor]] = {}
    for name, param in model.trunk.named_parameters(prefix="trunk"):
        part = {"rule": "", "parameter": f"{name}:", "module": f"{name.rpartition('.')[0]}:"}[per]
        parts.setdefault(part, []).append(param)
    for part, params in parts.items():
        first, second = jacobian(two(model, x), params)
        wanted = {
            "cosine": torch.dot(first, second) / (first.norm() * second.norm()),
            "ratio": first.norm() / second.norm(),
        }
        for stat, value in wanted.items():
            found = session.latest(f"{part}seg/depth", stat)
            assert found == pytest.approx(float(value), rel=1e-6)


def test_rules_on_the_same_gradients_share_their_inner_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []
    compute = inner_products._inner_products

    def count(rows: Any, *args: Any, **named: Any) -> Tensor:
        computed.append(len(rows))
        return compute(rows, *args, **named)

    monkeypatch.setattr(inner_products, "_inner_products", count)
    model, x = heads()
    given = [{"action": "conflict"}, MGDA]
    elsewhere = {"action": "combine", "method": "mgda", "id": "head", "params": "seg.*"}
    applied(model, *given, elsewhere)
    gradsurgeon.backward(two(model, x))
    assert computed == [2, 2]


def test_a_loss_that_no_rule_names_is_added_as_it_is() -> None:
    model, x = heads()

    def penalty() -> Tensor:
        return torch.stack([param.square().sum() for param in model.parameters()]).sum()

    matrix = jacobian(two(model, x), trunk_of(model))
    more = jacobian({"penalty": penalty()}, trunk_of(model))[0]
    applied(model, MGDA)
    gradsurgeon.backward({**two(model, x), "penalty": penalty()})
    wanted = aggregator("mgda")(matrix) + more
    check(model, wanted)


def test_two_rules_combine_what_each_matches() -> None:
    model, x = heads()
    session = applied(
        model,
        {"action": "combine", "id": "low", "method": "mgda", "params": "trunk.0.*"},
        {"action": "combine", "id": "high", "method": "imtl-g", "params": "trunk.2.*"},
    )
    for method, layer in (("mgda", "0"), ("imtl-g", "2")):
        params = list(model.get_submodule(f"trunk.{layer}").parameters())
        wanted = aggregator(method)(jacobian(two(model, x), params))
        model.zero_grad()
        gradsurgeon.backward(two(model, x))
        torch.testing.assert_close(flat_grads(params), wanted, rtol=1e-9, atol=1e-12)
    assert fired(session) == {"low": 2, "high": 2}


def test_a_preference_counts_and_ones_give_the_sum() -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    model, x = heads()
    matrix = jacobian(two(model, x), trunk_of(model))
    rule = {"action": "combine", "method": "upgrad", "preference": {"seg": 3.0}}
    applied(model, rule)
    gradsurgeon.backward(two(model, x))
    wanted = aggregation.UPGrad(pref_vector=torch.tensor([3.0, 1.0]))(matrix)
    check(model, wanted)


def test_a_memory_only_constrains() -> None:
    """A-GEM, equation 11: what conflicts with the memory is taken away, and nothing else changes."""
    model, x = heads()
    mine, memory = jacobian(two(model, x), trunk_of(model))
    rule = {"action": "combine", "method": "dualproj", "memory": ["depth"]}
    applied(model, rule)
    gradsurgeon.backward(two(model, x))
    product = torch.dot(mine, memory)
    assert product < 0
    wanted = mine - product / memory.square().sum() * memory
    torch.testing.assert_close(flat_grads(trunk_of(model)), wanted, rtol=1e-9, atol=1e-10)


@singly(size=[1e-6, 1e-3, 1.0, 1e4], method=["upgrad", "dualproj", "cagrad", "mgda", "imtl-g"])
def test_the_size_of_all_losses_makes_no_difference(method: str, size: float) -> None:
    model, x = heads()
    combine = {"action": "combine", "method": method, **OPTIONS.get(method, {})}
    applied(model, combine)
    gradsurgeon.backward(two(model, x))
    wanted = flat_grads(trunk_of(model)) * size
    model.zero_grad()
    gradsurgeon.backward({name: loss * size for name, loss in two(model, x).items()})
    torch.testing.assert_close(flat_grads(trunk_of(model)), wanted, rtol=1e-6, atol=1e-9 * size)


def test_a_loss_that_is_not_there_or_does_not_reach_leaves_the_others_alone() -> None:
    model, x = heads()
    session = applied(model, {"action": "combine", "method": "upgrad"})
    cases: list[dict[str, Tensor]] = [
        {},
        {"depth": torch.tensor(3.0)},
        {"depth": cast("Tensor", model.depth.bias).sum()},
    ]
    for rest in cases:
        model.zero_grad()
        wanted = jacobian({"seg": two(model, x)["seg"]}, trunk_of(model))[0]
        gradsurgeon.backward({"seg": two(model, x)["seg"], **rest})
        torch.testing.assert_close(flat_grads(trunk_of(model)), wanted, rtol=1e-12, atol=1e-15)
    assert session.status()["combine"].changed == 0


def test_a_misspelt_loss_is_said_at_once() -> None:
    model, x = heads()
    applied(model, {"action": "combine", "method": "mgda", "losses": ["seg", "dept"]})
    with pytest.warns(
        GradSurgeonWarning,
        match=r"no loss is called dept: .*`depth`",
    ):
        gradsurgeon.backward(two(model, x))


def test_losses_of_another_model_may_come_through_this_one() -> None:
    """Those of a generator reach the discriminator, whose rule names its own."""
    generator, model, x = nn.Linear(6, 6), Heads(), torch.randn(5, 6)
    held = [sgd(each) for each in (generator, model)]
    applied(
        generator,
        {"action": "combine", "method": "mgda", "params": "*", "losses": ["adv", "rec"]},
    )
    session = applied(model, MGDA)
    for _ in range(3):
        adv, rec = two(model, generator(x)).values()
        gradsurgeon.backward({"adv": adv, "rec": rec})
        held[0].step()
        model.zero_grad()
        gradsurgeon.backward(two(model, generator(x).detach()))
        held[1].step()
    assert [event.message for event in session.events if "no loss" in event.message] == []


def test_a_loss_that_never_comes_is_said_in_the_end() -> None:
    model, x = heads()
    session = applied(model, MGDA)
    gradsurgeon.backward({"seg": two(model, x)["seg"]})
    session.remove()
    told = messages(session, "never-fired")
    assert told == ["no call of gradsurgeon.backward gave the loss depth"]
    assert not any(param._backward_hooks for param in model.parameters())


def test_a_plain_backward_pass_is_said_at_once() -> None:
    model, x = heads()
    applied(model, MGDA)
    with pytest.warns(
        GradSurgeonWarning,
        match=r"reached trunk.0.weight without .*gradsurgeon.backward",
    ):
        two(model, x)["seg"].backward()


@singly(culprit=["seg", "depth"], method=METHODS)
def test_a_loss_that_is_not_finite_is_named_and_left_to_the_trap(method: str, culprit: str) -> None:
    names = ["seg", "depth", "third"]
    model, x = heads()
    before = weights_of(model)
    combine = {"action": "combine", "losses": names, "method": method, **OPTIONS.get(method, {})}
    trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
    file = rules(combine)
    file["rules"].append(trap)
    optimizer = sgd(model)
    session = gradsurgeon.apply(model, file)
    losses = {**two(model, x), "third": model(x)[0].mean()}
    losses[culprit] = losses[culprit] * torch.tensor(float("nan"))
    gradsurgeon.backward(losses)
    optimizer.step()
    assert equal(before, model.parameters())
    (said,) = fields_of(session, "message", rule="combine")
    assert said.startswith(f"the gradient of {culprit} is non-finite")
    assert fields_of(session, "kind", rule="trap")[:1] == ["trap"]


def test_hooks_of_the_script_see_the_combined_gradient_once() -> None:
    model, x = heads()
    weight = model.trunk[0].weight
    wanted = of_torchjd("mgda", model, x)
    first = wanted[: weight.numel()].view_as(weight)
    seen: list[tuple[str, Tensor]] = []

    def early(grad: Tensor) -> Tensor:
        seen.append(("early", grad))
        return grad * 3

    weight.register_hook(early)
    file = rules(MGDA)
    half = {"id": "half", "action": "scale", "params": "trunk.0.weight", "factor": 0.5}
    file["rules"].append(half)
    gradsurgeon.apply(model, file)
    weight.register_hook(lambda grad: seen.append(("late", grad)))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(("accumulated", p.grad)))
    gradsurgeon.backward(two(model, x))
    assert [name for name, _ in seen] == ["early", "late", "accumulated"]
    for (_, grad), factor in zip(seen, (1.0, 1.5, 1.5), strict=True):
        torch.testing.assert_close(grad, first * factor, rtol=1e-9, atol=1e-12)


def test_a_hook_registered_within_a_pass_stays() -> None:
    model, x = heads()
    weight = model.trunk[0].weight
    seen: list[str] = []
    losses = two(model, x)

    def register(_grad: Tensor) -> None:
        if not seen:
            seen.append("registered")
            weight.register_hook(lambda _: seen.append("called"))

    features = model.trunk(x)
    features.register_hook(register)
    losses = {"seg": model.seg(features).square().mean(), "depth": -model.depth(features).mean()}
    applied(model, MGDA)
    gradsurgeon.backward(losses)
    assert seen[0] == "registered"
    assert "called" in seen
    assert len(weight._backward_hooks) == 1  # nobody else tells


def test_gradients_accumulate_over_calls() -> None:
    model = Heads()
    batches = [torch.randn(5, 6) for _ in range(3)]
    wanted = torch.stack([of_torchjd("mgda", model, x) for x in batches]).sum(0)
    optimizer = sgd(model, 0.0)
    session = applied(model, MGDA, {"action": "conflict"})
    with pytest.warns(GradSurgeonWarning, match="combines the losses of each backward pass"):
        for x in batches:
            gradsurgeon.backward(two(model, x))
    check(model, wanted)
    optimizer.step()
    assert steps_of(session, "seg/depth", "cosine") == [0, 0, 0]


def _halve(_module: nn.Module, _args: Any, output: Tensor) -> None:
    output.register_hook(lambda grad: grad * 0.5)


def test_module_rules_act_in_every_pass_and_all_records_are_of_the_combined_gradient() -> None:
    model, x = heads()
    edited = copy.deepcopy(model)
    edited.trunk[0].register_forward_hook(_halve)
    wanted = aggregator("mgda")(jacobian(two(edited, x), trunk_of(edited)))
    norm = float(wanted[: model.trunk[0].weight.numel()].norm())
    file = rules(MGDA)
    points = ("backward", "accumulated", "step")
    for at in points:
        file["rules"].append({"id": at, "action": "norm-log", "params": "trunk.0.weight", "at": at})
    of = {"modules": "trunk.0", "tensor": "output.grad"}
    file["rules"] += [
        {"id": "half", "action": "scale", "factor": 0.5, **of},
        {"id": "norms", "action": "norm-log", **of},
        {"id": "kept", "action": "capture", **of},
        {"id": "trap", "action": "nan-trap", **of},
    ]
    optimizer = sgd(model, 0.0)
    session = gradsurgeon.apply(model, file)
    gradsurgeon.backward(two(model, x))
    check(model, wanted)
    optimizer.step()
    assert set(fired(session).values()) == {1}
    for at in points:
        hold_rows(session.history("trunk.0.weight", rule=at), [(0, norm)], rel=1e-6)
    assert steps_of(session, "trunk.0", rule="norms") == [0]
    assert len(session.captured("kept")) == 1


def test_rules_act_in_their_steps_and_by_their_optimizer() -> None:
    model = Heads()
    first = sgd(model.trunk[0])
    second = torch.optim.SGD(
        [*model.trunk[2].parameters(), *model.seg.parameters(), *model.depth.parameters()], lr=0.1
    )
    session = applied(
        model, {"action": "combine", "method": "mgda", "steps": {"from": 1, "every": 2}}
    )
    for _ in range(4):
        x = torch.randn(5, 6)
        model.zero_grad()
        other, _ = plainly(model, x)
        gradsurgeon.backward(two(model, x))
        assert same(grads_of(model), grads_of(other)) == (session.step % 2 == 0)
        first.step()
        second.step()
    assert session.status()["combine"].fired == 2


def test_one_parameter_under_two_models() -> None:
    """The inner model has a session of its own, which only compares."""
    model, x = heads()
    wanted = of_torchjd("mgda", model, x)
    applied(model, MGDA)
    inner = applied(model.trunk, {"action": "conflict", "params": "*"})
    gradsurgeon.backward(two(model, x))
    check(model, wanted)
    assert inner.status()["conflict"].fired == 1


def test_two_sessions_that_combine_one_gradient_are_refused_by_name() -> None:
    model, x = heads()
    applied(model, {"action": "combine", "method": "mgda", "id": "outer"})
    inner = {"action": "combine", "method": "pcgrad", "id": "inner", "params": "0.*"}
    applied(model.trunk, inner)
    text = (
        r"rule (inner|outer): the rule (inner|outer) of another session combines (trunk\.)?0.weight"
    )
    with pytest.raises(gradsurgeon.GradSurgeonError, match=text):
        gradsurgeon.backward(two(model, x))
    assert all(param.grad is None for param in model.parameters())


def test_an_overflow_reaches_the_scaler() -> None:
    torch.set_default_dtype(torch.float32)
    model, x = heads()
    before = weights_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = sgd(model)
    applied(model, {"action": "combine", "method": "upgrad"})
    gradsurgeon.backward({name: loss * 1e10 for name, loss in two(model, x).items()}, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert equal(before, model.parameters())


@pytest.mark.parametrize("rule", [{"action": "conflict"}, MGDA])
def test_what_an_activation_keeps_is_the_gradient_of_one_pass(rule: Json) -> None:
    model, x = Heads().double(), torch.randn(5, 6).double()
    other = (torch.randn(3, requires_grad=True) * 2).tanh()

    def kept(call: Callable[[dict[str, Tensor]], object]) -> tuple[Tensor, Tensor]:
        hidden = model.trunk(x)
        hidden.retain_grad()
        other.retain_grad()
        other.sum().backward(retain_graph=True)  # a graph that the losses do not share
        hidden.grad = torch.ones_like(hidden)  # what is there is added to
        seg, depth = model.seg(hidden), model.depth(hidden)
        call({"seg": seg.square().mean(), "depth": (depth - 1).square().mean()})
        assert hidden.grad is not None
        assert other.grad is not None
        return hidden.grad.clone(), other.grad.clone()

    plain, apart = kept(lambda losses: (losses["seg"] + losses["depth"]).backward())
    original = Tensor.retain_grad
    with applied(model, {**rule, "params": "trunk.*"}):
        found, apart_too = kept(gradsurgeon.backward)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(apart_too, 2 * apart)
    assert Tensor.retain_grad is original


def test_losses_are_given_by_name_and_are_one_number_each() -> None:
    model, x = heads()
    seg = two(model, x)["seg"]
    for wrong, error, text in (
        ([seg], TypeError, "by name"),
        ({1: seg}, TypeError, "by name"),
        ({"": seg}, TypeError, "by name"),
        ({}, ValueError, "at least one"),
        ({"seg": 1.0}, TypeError, "the loss seg is not a tensor, but of type float"),
        ({"seg": model(x)[0]}, ValueError, r"the loss seg has the shape \(5, 3\)"),
    ):
        with pytest.raises(error, match=text):
            gradsurgeon.backward(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"GradScaler, not int"):
        gradsurgeon.backward({"seg": seg}, scaler=3)  # type: ignore[arg-type]
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_method_that_follows_the_scale_takes_true_units(by_hand: bool) -> None:
    torch.set_default_dtype(torch.float32)
    model, x = heads()
    wanted = of_torchjd("fairgrad", model, x)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    applied(model, {"action": "combine", "method": "fairgrad", "alpha": 1.0}, scaler=scaler)
    losses = two(model, x)
    if by_hand:
        gradsurgeon.backward({name: scaler.scale(loss) for name, loss in losses.items()})
    else:
        gradsurgeon.backward(losses, scaler=scaler)
    torch.testing.assert_close(flat_grads(trunk_of(model)) / 2**10, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.no_cover
def test_a_compiled_training_step_may_call_it() -> None:
    torch.set_default_dtype(torch.float32)
    torch._dynamo.reset()
    model, x = heads()
    wanted = of_torchjd("mgda", model, x)
    applied(model, MGDA)

    @torch.compile(backend="eager")
    def step(x: Tensor) -> None:
        gradsurgeon.backward(two(model, x))

    step(x)
    torch.testing.assert_close(flat_grads(trunk_of(model)), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("weight", "dtype"), [(0.995, torch.bfloat16), (1 + 1e-6, torch.float32), (0.98, torch.float32)]
)
def test_losses_that_all_but_cancel_are_combined(weight: float, dtype: torch.dtype) -> None:
    torch.set_default_dtype(torch.float32)
    model, x = Heads(width=5), torch.randn(64, 6)
    session = applied(model, {"action": "combine", "method": "upgrad"})
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        features = model.trunk(x)
        first, second = (model.seg(features).float() - 1).square().mean(), model.seg(features)
        losses = {"seg": first, "depth": -weight * (second.float() - 1).square().mean()}
    gradsurgeon.backward(losses)
    assert session.latest("combined", "distance") > 0
    assert session.status()["combine"].fired == 1


# -------------------------------------------------------------------------------------------------
# Methods that draw random numbers: new ones in each call, by the seed of the script, whose own numbers stay its own.
# -------------------------------------------------------------------------------------------------


MANY = [f"loss {number}" for number in range(12)]


@pytest.mark.filterwarnings("ignore:.*combines the losses of each backward pass")
def test_numbers_follow_from_the_seed_the_rule_the_step_and_the_call() -> None:
    model, x = heads()
    directions = torch.randn(len(MANY), 8)
    optimizer = sgd(model, 0.0)

    def losses() -> dict[str, Tensor]:
        return dict(zip(MANY, (model.trunk(x) @ directions.T).sum(0), strict=True))

    matrix = jacobian(losses(), trunk_of(model))
    found = []
    rule = {"id": "one", "action": "combine", "method": "pcgrad", "losses": MANY}
    with applied(model, rule, start_step=1):
        for step in (1, 2):
            for call in (0, 1):
                with drawing("one", step, call):
                    wanted = aggregator("pcgrad")(matrix)
                model.zero_grad()
                gradsurgeon.backward(losses())
                check(model, wanted)
                found.append(float(wanted.sum()))
            optimizer.step()
    # Of so many losses that oppose each other there are so many orders that hardly two give the same weights.
    assert len(set(found)) == 4


@pytest.mark.filterwarnings("ignore:.*combines the losses of each backward pass")
def test_what_another_thread_draws_meanwhile_never_comes_again() -> None:
    model, x = heads()
    drawn: list[float] = []
    over = threading.Event()

    def draw() -> None:
        while not over.is_set():
            drawn.append(float(torch.rand((), dtype=torch.float64)))
            time.sleep(0)

    thread = threading.Thread(target=draw)
    with applied(model, {"action": "combine", "method": "pcgrad"}):
        thread.start()
        try:
            end = time.monotonic() + 20
            while len(drawn) < 500 and time.monotonic() < end:
                gradsurgeon.backward(two(model, x))
        finally:
            over.set()
            thread.join()
    assert len(set(drawn)) == len(drawn) >= 500


def test_another_default_device_changes_nothing_and_the_script_draws_its_own_numbers() -> None:
    model, x = heads()
    before = torch.get_rng_state()
    found: list[list[Tensor | None]] = []
    for device in ("cpu", "meta"):
        model.zero_grad()
        with applied(model, {"action": "combine", "method": "pcgrad"}):
            losses = two(model, x)
            torch.set_default_device(device)
            try:
                gradsurgeon.backward(losses)
            finally:
                torch.set_default_device(None)
        found.append([param.grad for param in trunk_of(model)])
    assert equal(*found)
    assert torch.equal(torch.get_rng_state(), before)
