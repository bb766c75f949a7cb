"""Rules on what several modules send back to a tensor that they take, in one ordinary backward pass."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pairs import singly
from ranks import Json
from several_losses import AVERAGE, OPTIONS, aggregator, drawing
from small import equal, fields_of, messages, sgd, steps_of, take_step, weights_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from two_heads import (
    CONFLICT,
    HEADS,
    MGDA,
    PCGRAD,
    ManyHeads,
    TwoHeads,
    applied,
    by_hand,
    close,
    cosine,
    grads_of,
    jacobian,
    loss,
    losses,
    opposed,
    rules,
    same,
    total,
)

import gradsurgeon
from gradsurgeon import GradSurgeonError, GradSurgeonWarning
from gradsurgeon.actions._methods import METHODS

pytestmark = pytest.mark.usefixtures("doubles")


def drawn_by(method: str) -> Callable[[Tensor], Tensor]:
    """Return an aggregator that draws what a rule draws in its first call."""

    def aggregate(matrix: Tensor) -> Tensor:
        with drawing():
            out: Tensor = aggregator(method)(matrix)
        return out

    return aggregate


def two_heads() -> tuple[TwoHeads, Tensor]:
    model = TwoHeads()
    opposed(model)
    return model, torch.randn(5, 6)


def many_heads(heads: int) -> tuple[ManyHeads, Tensor]:
    model = ManyHeads(heads)
    with torch.no_grad():
        first, *others = (head.weight for head in model.heads)
        for weight in others:
            weight.add_(first, alpha=2.0)
    return model, torch.randn(5, 6)


def plain(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Return the gradients without a rule."""
    state = torch.get_rng_state()
    loss(model(x)).backward()
    torch.set_rng_state(state)
    grads = grads_of(model)
    model.zero_grad()
    model.features = None
    return grads


# --- what arrives -------------------------------------------------------------------------------------


@singly(heads=[4, 2], method=METHODS)
def test_each_method_equals_that_of_torchjd_on_the_features(method: str, heads: int) -> None:
    model, x = many_heads(heads)
    wanted = by_hand(model, losses(model(x)), drawn_by(method))
    rule = {"action": "combine", "modules": "heads.*", "method": method, **OPTIONS.get(method, {})}
    session = applied(model, rule)
    loss(model(x)).backward()
    assert close(grads_of(model), wanted)
    assert session.status()["combine"].fired == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("rule", "mode"),
    [
        (CONFLICT, "act"),
        (PCGRAD, "observe"),
        (MGDA, "observe"),
    ],
    ids=["conflict", "observed pcgrad", "observed mgda"],
)
def test_what_does_not_act_leaves_every_bit(rule: Json, mode: Any, dtype: torch.dtype) -> None:
    for model in (TwoHeads(), TwoHeads(nn.Sequential(nn.Dropout(), nn.Linear(16, 3)))):
        model.to(dtype)
        x = torch.randn(5, 6).to(dtype)
        torch.manual_seed(7)
        wanted = plain(model, x)
        model(x)
        after = torch.get_rng_state()
        torch.manual_seed(7)
        with applied(model, rule, mode=mode) as session:
            loss(model(x)).backward()
            assert session.status()[rule["action"]].fired == 1
        assert same(grads_of(model), wanted)
        assert torch.equal(torch.get_rng_state(), after)


def test_records_are_of_what_came_and_one_view_serves_all_rules() -> None:
    model, x = two_heads()
    matrix = jacobian(losses(model(x)), model.features)
    seg, depth = matrix
    wanted = pytest.importorskip("torchjd.aggregation").MGDAWeighting()(matrix @ matrix.T)
    off = ((wanted - 1) @ matrix).norm() / matrix.sum(0).norm()
    ratio = float(seg.norm() / depth.norm())
    assert cosine(seg, depth) < 0
    views = []
    model.seg_head.register_forward_pre_hook(lambda _, args: views.append(args[0]))
    for order in ((MGDA, CONFLICT), (CONFLICT, MGDA)):
        model.zero_grad()
        views.clear()
        with applied(model, *order) as session:
            loss(model(x)).backward()
            pair = "seg_head/depth_head"
            assert session.latest(pair, "cosine") == pytest.approx(cosine(seg, depth), rel=1e-5)
            assert session.latest(pair, "ratio") == pytest.approx(ratio, rel=1e-5)
            weights = [session.latest(name, "weight") for name in HEADS]
            assert weights == pytest.approx(wanted.tolist(), rel=1e-5)
            assert session.latest("combined", "distance") == pytest.approx(float(off), rel=1e-5)
            assert session.status()["combine"].changed == 1
            # The head's view, the one that all of them have, and the trunk.
            node = views[0].grad_fn.next_functions[0][0].next_functions[0][0]
            assert node is model.features.grad_fn


def test_two_rules_on_two_pairs_of_heads_and_no_rule_on_the_fifth_head() -> None:
    model, x = many_heads(5)
    rows = jacobian(losses(model(x)), model.features)
    wanted = aggregator("mgda")(rows[:2]) + aggregator("upgrad")(rows[2:4]) + rows[4]
    applied(
        model,
        {**MGDA, "id": "first", "modules": "heads.{0..1}"},
        {"action": "combine", "method": "upgrad", "id": "last", "modules": "heads.{2..3}"},
    )
    outs = model(x)
    model.features.retain_grad()
    loss(outs).backward()
    torch.testing.assert_close(model.features.grad.flatten(), wanted)  # type: ignore[union-attr]


def test_rules_on_other_gradients_keep_their_place() -> None:
    """What one head sends back is edited before it is combined, and the gradient of the features after that."""
    model, x = two_heads()

    def edited(rows: Tensor) -> Any:
        rows[0] *= 3.0
        return aggregator("mgda")(rows) * 0.5

    wanted = by_hand(model, losses(model(x)), edited)
    file = rules(MGDA)
    before = {"id": "more", "modules": "seg_head", "tensor": "input.grad", "factor": 3.0}
    after = {"id": "less", "modules": "trunk", "tensor": "output.grad", "factor": 0.5}
    for rule in (after, before):
        file["rules"].append({"action": "scale", **rule})
    gradsurgeon.apply(model, file)
    loss(model(x)).backward()
    assert close(grads_of(model), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6])
def test_a_small_gradient_is_not_lost_beside_a_large_one(dtype: torch.dtype, ratio: float) -> None:
    """MGDA takes the small one nearly alone, which the sum of both has rounded away."""
    model, x = ManyHeads(2).to(dtype), torch.randn(5, 6).to(dtype)

    def run() -> list[Tensor]:
        first, second = model(x)
        return [first.float().sum() * 0.1, ratio * (-second.float()).exp().mean()]

    wanted = aggregator("mgda")(jacobian(run(), model.features).double())
    applied(model, {**MGDA, "modules": "heads.*"})
    parts = run()
    model.features.retain_grad()
    total(parts).backward()
    found = model.features.grad.double().flatten()  # type: ignore[union-attr]
    assert float((found - wanted).norm() / wanted.norm()) < 4 * torch.finfo(dtype).eps


def test_a_pass_that_has_failed_leaves_nothing_to_the_next() -> None:
    model, x = two_heads()
    wanted = by_hand(model, losses(model(x)), drawn_by("mgda"))
    applied(model, MGDA)
    outs = model(x)
    handle = outs[0].register_hook(stop)  # by then the other head has sent back its part
    value = loss(outs)
    with pytest.raises(RuntimeError, match="stop"):
        value.backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    # torch lets a pass through a kept graph go through once more.
    for passes in (1, 2):
        value.backward(retain_graph=True)
        assert close(grads_of(model), {name: passes * grad for name, grad in wanted.items()})


# --- which tensors ------------------------------------------------------------------------------------


class Several(nn.Module):
    """Heads that take two tensors in a structure, and share both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.seg_head = Takes()
        self.depth_head = Takes()

    def forward(self, x: Tensor) -> list[Tensor]:
        self.low = self.trunk(x)
        self.high = self.low.tanh()
        given = {"low": self.low, "hidden": self.high}
        return [self.seg_head(given), self.depth_head(given)]


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(8, 2)
        self.high = nn.Linear(8, 2)

    def forward(self, given: dict[str, Tensor]) -> Any:
        return self.low(given["low"]) + self.high(given["hidden"]).tanh()


@pytest.mark.parametrize("tensor", ["input.grad", "input[0].hidden.grad", "input.given.low.grad"])
def test_each_shared_tensor_is_combined_by_itself(tensor: str) -> None:
    model, x = Several(), torch.randn(5, 6)

    rows = jacobian(losses(model(x)), model.high)
    loss(model(x)).backward()
    before = grads_of(model)
    model.zero_grad()
    session = applied(model, {**MGDA, "tensor": tensor})
    outs = model(x)
    model.high.retain_grad()
    loss(outs).backward()
    wanted = rows.sum(0) if tensor == "input.given.low.grad" else aggregator("mgda")(rows)
    torch.testing.assert_close(model.high.grad.flatten(), wanted)
    assert not torch.allclose(grads_of(model)["trunk.weight"], before["trunk.weight"])
    assert session.status()["combine"].fired == (2 if tensor == "input.grad" else 1)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, features: Tensor) -> Any:
        return self.attention(features, features, features, need_weights=False)[0]


class CalledTwice(nn.Module):
    """One head is called twice on the features, the other in between."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.seg_head = nn.Linear(16, 2)
        self.depth_head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        self.features = self.trunk(x)
        once, between = self.seg_head(self.features), self.depth_head(self.features)
        return [once.sin() + self.seg_head(self.features).square(), between]


@pytest.mark.parametrize("kind", ["called twice", "attention"])
def test_what_one_module_sends_back_is_one_gradient(kind: str) -> None:
    model: Any = CalledTwice() if kind == "called twice" else TwoHeads(Attending())
    x = torch.randn(5, 6)
    modules = HEADS
    if kind == "attention":
        # The inner module takes the tensor three times over.
        modules = ["seg_head.attention", "depth_head"]
    wanted = by_hand(model, losses(model(x)), drawn_by("mgda"))
    session = applied(model, {**MGDA, "modules": modules})
    loss(model(x)).backward()
    assert close(grads_of(model), wanted)
    assert all(len(session.history(name, "weight")) == 1 for name in modules)


# --- passes that lack something -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["not called", "no loss", "detached", "no gradient", "kept graph"])
def test_one_head_alone_in_a_pass_is_ordinary(kind: str) -> None:
    model, x = two_heads()

    def run(model: TwoHeads) -> None:
        if kind == "not called":
            model.seg_head(model.trunk(x)).square().sum().backward()
        elif kind == "detached":
            seg, depth = model(x)
            loss([seg, depth.detach()]).backward()
        elif kind == "no gradient":
            features = model.trunk(x)
            with torch.no_grad():
                depth = model.depth_head(features)
            loss([model.seg_head(features), depth]).backward()
        elif kind == "kept graph":
            # The output of the other head is gone: nothing can come from it any more.
            model(x)[0].square().sum().backward(retain_graph=True)
        else:
            outs = model(x)
            outs[0].square().sum().backward()

    other = copy.deepcopy(model)
    run(other)
    session = applied(model, PCGRAD, CONFLICT)
    run(model)
    assert same(grads_of(model), grads_of(other))
    assert session.status()["combine"].fired == 0
    loss(model(x)).backward()
    assert session.status()["combine"].fired == 1


def test_one_parameter_is_what_all_heads_take() -> None:
    """What they take is a leaf, the same in every forward pass, and no weak reference may be on it."""
    model = nn.ModuleDict({name: nn.Linear(4, 2) for name in HEADS})
    queries = nn.Parameter(torch.randn(3, 4))
    model.register_parameter("queries", queries)
    applied(model, MGDA)

    def run() -> list[Tensor]:
        return losses([model[name](queries) for name in HEADS])

    rows = jacobian(run(), queries)
    wanted = aggregator("mgda")(rows).view_as(queries)
    for passes in (1, 2):
        total(run()).backward()
        torch.testing.assert_close(queries.grad, passes * wanted)
    with torch.no_grad():
        queries.mul_(2.0)  # a new version
    queries.grad = None
    rows = jacobian(run(), queries)
    total(run()).backward()
    torch.testing.assert_close(queries.grad, aggregator("mgda")(rows).view_as(queries))
    gc.collect()
    model.float()  # swaps contents where torch is told to
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_gradients_that_a_script_looks_at_do_not_count() -> None:
    """GradNorm and the like take the gradient of each loss, and then train."""
    model, x = two_heads()
    wanted = by_hand(model, losses(model(x)), drawn_by("mgda"))
    rows = jacobian(losses(model(x)), model.features)
    session = applied(model, MGDA)
    parts = losses(model(x))
    torch.testing.assert_close(jacobian(parts, model.features), rows)
    weight = model.trunk[0].weight
    for part in parts:
        torch.autograd.grad(part, weight, retain_graph=True)
    assert session.status()["combine"].fired == 0
    total(parts).backward()
    assert close(grads_of(model), wanted)


def test_named_losses_and_shared_features_together() -> None:
    model, x = two_heads()
    names = ["seg", "depth"]
    parts = dict(zip(names, losses(model(x)), strict=True))
    wanted = by_hand(model, list(parts.values()), drawn_by("mgda"))
    lower = {"action": "combine", **AVERAGE, "params": "trunk.0.bias", "losses": names}
    file = rules(MGDA)
    file["rules"].append({"id": "lower", **lower})
    bias = [
        torch.autograd.grad(part, model.trunk[0].bias, retain_graph=True)[0]
        for part in parts.values()
    ]
    session = gradsurgeon.apply(model, file)
    gradsurgeon.backward(dict(zip(names, losses(model(x)), strict=True)))
    wanted["trunk.0.bias"] = (bias[0] + bias[1]) / 2
    assert close(grads_of(model), wanted)
    assert session.status()["combine"].fired == 1


# --- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["no_grad", "inference", "grad", "raises"])
def test_forward_passes_without_a_backward_leave_nothing(kind: str) -> None:
    model, x = two_heads()
    session = applied(model, PCGRAD, CONFLICT)
    mode: Any = {"no_grad": torch.no_grad(), "inference": torch.inference_mode()}
    gc.disable()
    try:
        for _ in range(2):
            with mode.get(kind, torch.enable_grad()):
                outs = model(x)
                if kind == "raises":
                    with pytest.raises(RuntimeError, match="stop"):
                        outs[0].register_hook(stop)
                        loss(outs).backward()
            features = weakref.ref(model.features)
            del outs, model.features
            # None waits for the collector.
            assert features() is None
            model.zero_grad()
    finally:
        gc.enable()
    assert session.status()["combine"].fired == 0


def stop(_: Tensor) -> None:
    raise RuntimeError("stop")


def test_features_go_as_soon_as_their_gradients_have_met() -> None:
    model = TwoHeads(nn.Sequential(nn.ReLU(), nn.Linear(16, 3)))
    x = torch.randn(5, 6)
    applied(model, MGDA)
    value = loss(model(x))
    features = weakref.ref(model.features)
    del model.features
    value.backward()
    assert features() is None
    assert value.grad_fn is not None  # the loss may be kept, as for a mean


# --- in place ------------------------------------------------------------------------------------------


def in_place() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 3))


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_head_that_writes_to_its_input(comes_first: bool) -> None:
    """If it comes first, the other one takes what it has written: not the same tensor."""
    seg: nn.Module = in_place()
    depth: nn.Module = nn.Sequential(nn.Tanh(), nn.Linear(16, 3))
    if not comes_first:
        seg, depth = depth, seg
    model, x = TwoHeads(seg, depth), torch.randn(5, 6)
    model.trunk = nn.Linear(6, 16)
    wanted = plain(model, x)
    session = applied(model, PCGRAD)
    text = "seg_head took a tensor that was written in place"
    with pytest.warns(GradSurgeonWarning, match=text) if comes_first else nullcontext():
        loss(model(x)).backward()
    assert same(grads_of(model), wanted)
    assert session.status()["combine"].fired == 0


def test_a_head_that_is_one_operation_in_place_is_said() -> None:
    model, x = TwoHeads(nn.ReLU(inplace=True)), torch.randn(5, 6)
    model.trunk = nn.Linear(6, 16)
    applied(model, MGDA)
    text = "seg_head works in place on the tensor that it shares"
    with pytest.warns(GradSurgeonWarning, match=text):
        model.seg_head(model.trunk(x)).sum().backward()


# --- refused by name -------------------------------------------------------------------------------------


def test_separate_passes_are_refused() -> None:
    model, x = two_heads()
    applied(model, PCGRAD)
    seg, depth = losses(model(x))
    with pytest.raises(
        GradSurgeonError,
        match=r"step 0, rule combine: depth_head took .* with seg_head .*keeps its graph.*sum of the losses",
    ):
        seg.backward(retain_graph=True)
    assert model.trunk[0].weight.grad is None
    del depth


@pytest.mark.parametrize("rule", [CONFLICT, PCGRAD], ids=["conflict", "observed"])
def test_separate_passes_are_told_of_where_a_rule_only_looks_on(rule: Json) -> None:
    model, x = two_heads()
    other = copy.deepcopy(model)
    session = applied(model, rule, mode="observe")
    text = rf"rule {rule['action']}.*: depth_head took a tensor together with seg_head"
    for one in (other, model):
        seg, depth = losses(one(x))
        with nullcontext() if one is other else pytest.warns(GradSurgeonWarning, match=text):
            seg.backward(retain_graph=True)
            depth.backward()
    assert len(fields_of(session, "message", rule=rule["action"])) == 1
    assert same(grads_of(model), grads_of(other))


def test_a_second_pass_that_brings_the_rest_is_refused() -> None:
    """The trunk keeps nothing for its backward pass, so that torch lets it go through twice."""
    model, x = two_heads()
    applied(model, PCGRAD)
    features = torch.randn(5, 16, requires_grad=True) + 1.0
    seg, depth = losses([model.seg_head(features), model.depth_head(features)])
    seg.backward()
    with pytest.raises(GradSurgeonError, match=r"seg_head took .* not the first one"):
        depth.backward()
    del x


def test_a_pass_that_is_to_be_differentiated_is_refused() -> None:
    model, x = two_heads()
    session = applied(model, PCGRAD)
    x.requires_grad_()
    with pytest.raises(
        GradSurgeonError, match=r"rule combine: .*create_graph=True.* seg_head and depth_head"
    ):
        torch.autograd.grad(loss(model(x)), x, create_graph=True)
    session.pause()
    (slope,) = torch.autograd.grad(loss(model(x)), x, create_graph=True)
    slope.square().sum().backward()


def test_a_pass_that_is_to_be_differentiated_can_be_looked_at() -> None:
    model, x = two_heads()
    other = copy.deepcopy(model)
    session = applied(model, CONFLICT)
    x.requires_grad_()
    for one in (model, other):
        value = loss(one(x))
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        (value + slope.square().sum()).backward()
    # The terms of the second derivative are summed in other groups.
    assert close(grads_of(model), grads_of(other))
    assert session.status()["conflict"].fired >= 1


# --- checkpoints -------------------------------------------------------------------------------------------


class Checkpointed(TwoHeads):
    """Runs parts of its forward pass again in the backward pass."""

    def __init__(self, what: str, *, reentrant: bool) -> None:
        super().__init__(nn.Sequential(nn.Dropout(0.3), nn.Linear(16, 3)))
        self.what, self.reentrant = what, reentrant

    def forward(self, x: Tensor) -> list[Tensor]:
        if self.what == "all":
            return list(self._run(self._all, x.requires_grad_()))
        trunk = self._run(self.trunk, x.requires_grad_()) if self.what == "trunk" else self.trunk(x)
        heads = [self.seg_head, self.depth_head]
        if self.what == "heads":
            return [self._run(head, trunk) for head in heads]
        return [head(trunk) for head in heads]

    def _all(self, x: Tensor) -> tuple[Tensor, ...]:
        features = self.trunk(x)
        return self.seg_head(features), self.depth_head(features)

    def _run(self, what: Any, x: Tensor) -> Any:
        return checkpoint(what, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize(
    ("what", "reentrant"),
    [("trunk", False), ("heads", False), ("all", False), ("trunk", True), ("all", True)],
)
def test_checkpoints_give_the_same(what: str, *, reentrant: bool) -> None:
    x = torch.randn(5, 6)
    ends = []
    for kind in ("", what):
        torch.manual_seed(1)
        model = Checkpointed(kind, reentrant=reentrant)
        session = applied(model, MGDA, CONFLICT)
        torch.manual_seed(2)
        loss(model(x.clone())).backward()
        assert session.status()["combine"].fired == 1
        assert session.status()["conflict"].fired == 1
        ends.append(grads_of(model))
    assert same(*ends)


def test_a_reentrant_checkpoint_around_each_head() -> None:
    x = torch.randn(5, 6)
    model = Checkpointed("heads", reentrant=True)
    applied(model, PCGRAD)
    with pytest.raises(
        GradSurgeonError, match=r"rule combine: (seg|depth)_head takes .*use_reentrant=False"
    ):
        loss(model(x)).backward()
    model = Checkpointed("heads", reentrant=True)
    torch.manual_seed(3)
    wanted = plain(model, x)
    applied(model, CONFLICT)
    torch.manual_seed(3)
    with pytest.warns(GradSurgeonWarning, match="use_reentrant=False"):
        loss(model(x)).backward()
    assert same(grads_of(model), wanted)


# --- precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0**4, 2.0**20])
def test_loss_scaling(scale: float) -> None:
    """Inner products are in true units, and what arrives carries the scale."""
    ends, records = [], []
    for enabled in (False, True):
        torch.manual_seed(0)
        model, x = two_heads()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
        session = applied(
            model, {"action": "combine", "method": "fairgrad", "alpha": 1.0}, CONFLICT
        )
        scaler.scale(loss(model(x))).backward()
        scaler.step(optimizer)
        scaler.update()
        ends.append({name: param.detach().clone() for name, param in model.named_parameters()})
        records.append(
            [
                session.history("seg_head", "weight"),
                session.history("seg_head/depth_head", "ratio"),
            ]
        )
        session.remove()
    assert close(*ends)
    assert records[0] == records[1]


def test_an_overflow_reaches_the_scaler() -> None:
    model, x = two_heads()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    session = applied(model, PCGRAD)
    before = weights_of(model)
    outs = model(x)
    scaler.scale(loss([outs[0] * float("inf"), outs[1]])).backward()
    assert not model.trunk[0].weight.grad.isfinite().any()
    scaler.step(optimizer)
    scaler.update()
    assert equal(before, model.parameters())
    assert scaler.get_scale() == 1.0
    (said,) = fields_of(session, "message", rule="combine")
    assert said.startswith("the gradient of seg_head is non-finite")


# --- torch.func, copies, an end -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vmap", "jacrev", "is_grads_batched"])
def test_transforms_leave_alone(kind: str) -> None:
    model, x = two_heads()

    def value(params: Any, x: Tensor) -> Tensor:
        return loss(torch.func.functional_call(model, params, (x,)))

    def run() -> Any:
        params = dict(model.named_parameters())
        if kind == "jacrev":
            return torch.func.jacrev(value)(params, x)["trunk.0.weight"]
        if kind == "vmap":
            each = torch.func.vmap(torch.func.grad(value), in_dims=(None, 0))
            return each(params, x.unsqueeze(1))["trunk.0.weight"]
        outs = model(x)
        torch.manual_seed(0)
        seeds = [torch.randn(3, *out.shape) for out in outs]
        weight = model.trunk[0].weight
        return torch.autograd.grad(outs, weight, seeds, is_grads_batched=True)[0]

    wanted = run()
    applied(model, MGDA)
    with pytest.warns(GradSurgeonWarning, match=r"torch.func"):
        assert torch.equal(run(), wanted)


@pytest.mark.parametrize("moment", ["before", "between"])
@pytest.mark.parametrize("how", ["remove", "pause"])
def test_no_rule_acts_any_more(how: str, moment: str) -> None:
    model, x = two_heads()
    wanted = plain(model, x)
    session = applied(model, MGDA)
    outs = model(x) if moment == "between" else None
    if how == "remove":
        session.remove()
    else:
        session.pause()
    loss(outs or model(x)).backward()
    assert same(grads_of(model), wanted)
    assert session.status()["combine"].fired == 0
    assert not any(module._forward_pre_hooks for module in model.modules()) or how == "pause"
    if how == "pause":
        session.resume()
        model.zero_grad()
        loss(model(x)).backward()
        assert session.status()["combine"].fired == 1


# --- steps --------------------------------------------------------------------------------------------------


def test_two_optimizers_go_by_the_first_of_the_modules() -> None:
    model, x = two_heads()
    trunk = sgd(model.trunk)
    seg = sgd(model.seg_head)
    depth = sgd(model.depth_head)
    session = applied(model, {**MGDA, "steps": {"every": 2}}, optimizer=[trunk, seg, depth])
    for step in range(4):
        model.zero_grad()
        loss(model(x)).backward()
        trunk.step()
        seg.step()
        if step == 3:
            depth.step()
    assert steps_of(session, "seg_head", "weight") == [0, 2]


# --- nothing is silent -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
@pytest.mark.parametrize("kind", ["different tensors", "in turn"])
def test_heads_whose_gradients_never_meet(kind: str) -> None:
    model, x = two_heads()
    session = applied(model, PCGRAD)
    turn = iter(range(9))

    def run() -> Tensor:
        if kind == "in turn":
            return losses(model(x))[next(turn) % 2]
        return loss([model.seg_head(model.trunk(x)), model.depth_head(model.trunk(x).sin())])

    optimizer = sgd(model, 0.01)
    for _ in range(4):
        take_step(optimizer, run())
    session.remove()
    (said,) = messages(session, "never-fired")
    assert "no two of the modules the rule matched sent gradients back to one tensor" in said


@pytest.mark.slow
@pytest.mark.no_cover
# Tracing what follows a graph break, torch warns about its own doing.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("when", ["before", "after the first call"])
def test_a_compiled_model_is_as_one_that_is_not(when: str) -> None:
    torch.set_default_dtype(torch.float32)
    torch._dynamo.reset()
    model, x = TwoHeads(), torch.randn(5, 6)
    opposed(model)
    wanted = by_hand(model, losses(model(x)), drawn_by("mgda"))
    called: Any = torch.compile(model, backend="aot_eager")
    if when == "before":
        applied(model, MGDA)
    else:
        called(x)
        with pytest.warns(GradSurgeonWarning, match="after the first compiled call"):
            applied(model, MGDA)
    loss(called(x)).backward()
    for name, grad in grads_of(model).items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5)
