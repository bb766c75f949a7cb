"""`combine` and `conflict` where modules take one tensor: what comes of it, and what must be left alone."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from several_losses import (
    AVERAGE,
    OPTIONS,
    Checkpointed,
    Heads,
    aggregator,
    drawing,
    flat_grads,
    grads_of,
    rules,
    two,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon import GradSurgeonError, GradSurgeonWarning
from gradsurgeon.actions._methods import METHODS

OF = {"modules": ["seg", "depth"], "tensor": "input.grad"}


def on_heads(*given: dict[str, Any]) -> dict[str, Any]:
    """Return a rule file of rules on the heads."""
    return {"version": 1, "rules": [{"id": rule["action"], **OF, **rule} for rule in given]}


pytestmark = pytest.mark.usefixtures("doubles")


def total(model: nn.Module, x: Tensor) -> Any:
    seg, depth = two(model, x).values()
    return seg + depth


def by_hand(model: Any, x: Tensor, method: str, losses_of: Any) -> Tensor:
    """Return the gradients of the trunk that TorchJD's aggregator gives on the features."""
    aggregate = aggregator(method)
    features = model.trunk(x)
    cut = features.detach().requires_grad_()
    other = copy.copy(model)
    other._modules = {**model._modules, "trunk": nn.Identity()}  # the same heads
    losses = losses_of(other, cut)
    rows = [torch.autograd.grad(loss, cut, retain_graph=True)[0] for loss in losses.values()]
    with drawing():
        combined = aggregate(torch.stack([row.flatten() for row in rows]))
    grads = torch.autograd.grad(features, [*model.trunk.parameters()], combined.view_as(features))
    return torch.cat([grad.flatten() for grad in grads])


def conflicting(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return a loss for each head."""
    seg, depth = model(x)
    return {"seg": seg.square().mean() * 5, "depth": -depth[:, :1].sum() - seg.detach().sum()}


@pytest.mark.parametrize("method", METHODS)
def test_each_method_equals_the_aggregator_of_torchjd_on_the_features(method: str) -> None:
    model, x = Heads(), torch.randn(5, 6)
    wanted = by_hand(model, x, method, conflicting)
    options = OPTIONS.get(method, {})
    session = gradsurgeon.apply(
        model, on_heads({"action": "combine", "method": method, **options}, {"action": "conflict"})
    )
    sum(conflicting(model, x).values()).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(
        flat_grads([*model.trunk.parameters()]), wanted, rtol=1e-9, atol=1e-12
    )
    assert session.status()["combine"].fired == 1
    assert session.latest("seg/depth", "cosine") < 0


@pytest.mark.parametrize("armed", ["conflict", "observed", "paused", "out of its steps"])
@pytest.mark.parametrize("trunk", ["mlp", "checkpoint"])
def test_nothing_changes_without_a_rule_that_combines(armed: str, trunk: str) -> None:
    model, x = Heads(Checkpointed() if trunk == "checkpoint" else None), torch.randn(5, 6)
    other, state = copy.deepcopy(model), torch.get_rng_state()
    total(other, x).backward()
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    combine = {"action": "combine", "method": "pcgrad"}
    if armed == "out of its steps":
        combine["steps"] = {"from": 5}  # type: ignore[assignment]
    given = {"action": "conflict"} if armed == "conflict" else combine
    mode: Any = "observe" if armed == "observed" else "act"
    session = gradsurgeon.apply(model, on_heads(given), mode=mode)
    if armed == "paused":
        session.pause()
    total(model, x).backward()
    assert torch.equal(torch.get_rng_state(), drawn)
    for (name, found), (_, wanted) in zip(
        grads_of(model).items(), grads_of(other).items(), strict=True
    ):
        assert found is not None, name
        assert wanted is not None, name
        assert torch.equal(found, wanted), name
    assert all(map(torch.equal, model.buffers(), other.buffers()))
    fired = {"conflict": 1, "observed": 1}.get(armed, 0)
    assert session.status()[given["action"]].fired == fired


def test_what_others_send_back_is_added_as_it_is() -> None:
    class More(Heads):
        def forward(self, x: Tensor) -> Any:
            features = self.trunk(x)
            return self.seg(features), self.depth(features), features.square().sum()

    def three(model: nn.Module, x: Tensor) -> Any:
        seg, depth, more = model(x)
        return seg.square().mean() - depth.sum() + more

    model, x = More(), torch.randn(5, 6)
    features = model.trunk(x)
    more = torch.autograd.grad(
        features.square().sum(), [*model.trunk.parameters()], retain_graph=True
    )
    heads = model.seg(features).square().mean() - model.depth(features).sum()
    both = torch.autograd.grad(heads, [*model.trunk.parameters()])
    wanted = torch.cat([(a + b / 2).flatten() for a, b in zip(more, both, strict=True)])
    gradsurgeon.apply(model, on_heads({"action": "combine", **AVERAGE}))
    three(model, x).backward()
    torch.testing.assert_close(
        flat_grads([*model.trunk.parameters()]), wanted, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_is_much_larger_leaves_the_other_its_digits(dtype: torch.dtype) -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    model, x = Heads().to(dtype), torch.randn(5, 6, dtype=dtype)

    def losses() -> tuple[Tensor, list[Tensor]]:
        features = model.trunk(x)
        features.retain_grad()
        seg, depth = model.seg(features), model.depth(features)
        return features, [seg.float().square().mean() * 1e5, (depth.float() - 1).square().mean()]

    features, apart = losses()
    rows = [torch.autograd.grad(loss, features, retain_graph=True)[0].double() for loss in apart]
    wanted = aggregation.IMTLG()(torch.stack([row.flatten() for row in rows]))
    gradsurgeon.apply(model, on_heads({"action": "combine", "method": "imtl-g"}))
    features, apart = losses()
    sum(apart).backward()  # type: ignore[union-attr]
    assert features.grad is not None
    off = (features.grad.double().flatten() - wanted).norm() / wanted.norm()
    assert float(off) < 2 * torch.finfo(dtype).eps


def test_rules_on_other_gradients_keep_their_place() -> None:
    """A module's own share is edited before it is combined; the gradient of the trunk's output after that."""
    model, x = Heads(), torch.randn(5, 6)
    file = on_heads({"action": "combine", **AVERAGE})
    file["rules"] += [
        {"id": "less", "action": "scale", "factor": 0.5, "modules": "seg", "tensor": "input.grad"},
        {
            "id": "more",
            "action": "scale",
            "factor": 3.0,
            "modules": "trunk",
            "tensor": "output.grad",
        },
    ]
    features = model.trunk(x)
    seg = torch.autograd.grad(model.seg(features).square().mean(), features, retain_graph=True)[0]
    depth = torch.autograd.grad(model.depth(features).sum(), features, retain_graph=True)[0]
    grads = torch.autograd.grad(features, [*model.trunk.parameters()], (0.5 * seg + depth) / 2 * 3)
    gradsurgeon.apply(model, file)
    a, b = model(x)
    (a.square().mean() + b.sum()).backward()
    wanted = torch.cat([grad.flatten() for grad in grads])
    torch.testing.assert_close(
        flat_grads([*model.trunk.parameters()]), wanted, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("what", ["its loss is missing", "it is detached", "it is not called"])
def test_one_head_alone_is_an_ordinary_thing(what: str) -> None:
    model, x = Heads(), torch.randn(5, 6)
    session = gradsurgeon.apply(model, on_heads({"action": "combine", **AVERAGE}))
    other = copy.deepcopy(model)
    other.seg(other.trunk(x)).sum().backward()
    features = model.trunk(x)
    loss = model.seg(features).sum()
    if what == "its loss is missing":
        model.depth(features)
    elif what == "it is detached":
        loss = loss + model.depth(features.detach()).detach().sum()
    loss.backward()
    assert torch.equal(
        flat_grads([*model.trunk.parameters()]), flat_grads([*other.trunk.parameters()])
    )
    assert session.status()["combine"].fired == 0


def test_interleaved_batches_meet_each_by_itself() -> None:
    model = Heads()
    first, second = torch.randn(5, 6), torch.randn(5, 6)
    wanted = by_hand(model, first, "mgda", conflicting) + by_hand(
        model, second, "mgda", conflicting
    )
    gradsurgeon.apply(model, on_heads({"action": "combine", "method": "mgda"}))
    features = [model.trunk(first), model.trunk(second)]
    segs = [model.seg(one) for one in features]
    depths = [model.depth(one) for one in features]
    for seg, depth in zip(segs, depths, strict=True):
        losses = conflicting(lambda _, out=(seg, depth): out, first)  # type: ignore[arg-type]
        (losses["seg"] + losses["depth"]).backward()
    torch.testing.assert_close(
        flat_grads([*model.trunk.parameters()]), wanted, rtol=1e-9, atol=1e-12
    )


def test_a_module_that_is_called_twice_counts_once() -> None:
    model, x = Heads(), torch.randn(5, 6)
    gradsurgeon.apply(model, on_heads({"action": "combine", **AVERAGE}, {"action": "conflict"}))
    features = model.trunk(x)
    loss = (
        model.seg(features).sum() + model.seg(features).square().sum() + model.depth(features).sum()
    )
    other = Heads()
    other.load_state_dict(model.state_dict())
    plain = other.trunk(x)
    same = other.seg(plain).sum() + other.seg(plain).square().sum() + other.depth(plain).sum()
    same.backward()
    loss.backward()
    wanted = flat_grads([*other.trunk.parameters()]) / 2
    torch.testing.assert_close(
        flat_grads([*model.trunk.parameters()]), wanted, rtol=1e-9, atol=1e-12
    )


class Taking(nn.Module):
    """A head that takes several tensors, the features by name."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 1)

    def forward(self, scale: Tensor, *, hidden: dict[str, Tensor]) -> Any:
        return self.out(hidden["last"]).sum() * scale.sum()


@pytest.mark.parametrize("path", ["input.hidden.last.grad", "input.grad"])
def test_one_of_several_tensors(path: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(6, 8)
            self.seg, self.depth = Taking(), Taking()
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            features = self.trunk(x)
            scales = [scale * 1.0 for scale in self.scales]
            seg = self.seg(scales[0], hidden={"last": features})
            return torch.as_tensor(seg + self.depth(scales[1], hidden={"last": features}))

    model, x = Model(), torch.randn(5, 6)
    model(x).backward()
    wanted, scales = flat_grads([*model.trunk.parameters()]) / 2, flat_grads([*model.scales])
    model.zero_grad()
    session = gradsurgeon.apply(model, on_heads({"action": "combine", **AVERAGE, "tensor": path}))
    model(x).backward()
    torch.testing.assert_close(flat_grads([*model.trunk.parameters()]), wanted)
    assert torch.equal(flat_grads([*model.scales]), scales)
    assert session.status()["combine"].fired == 1


@pytest.mark.parametrize("action", ["combine", "conflict"])
def test_separate_passes_are_refused_by_name(action: str) -> None:
    model, x = Heads(), torch.randn(5, 6)
    rule = {"action": "combine", **AVERAGE} if action == "combine" else {"action": action}
    gradsurgeon.apply(model, on_heads(rule))
    a, b = model(x)
    text = r"depth took a tensor together with seg and sends nothing back .*keeps its graph.*once, on the sum"
    if action == "combine":
        with pytest.raises(GradSurgeonError, match=f"rule combine: {text}"):
            a.sum().backward(retain_graph=True)
    else:
        with pytest.warns(GradSurgeonWarning, match=text):
            a.sum().backward(retain_graph=True)
        b.sum().backward()


def test_a_second_pass_that_brings_all_of_it_is_ordinary() -> None:
    model, x = Heads(), torch.randn(5, 6)
    session = gradsurgeon.apply(model, on_heads({"action": "combine", **AVERAGE}))
    loss = total(model, x)
    loss.backward(retain_graph=True)
    once = flat_grads([*model.trunk.parameters()])
    loss.backward()
    torch.testing.assert_close(flat_grads([*model.trunk.parameters()]), 2 * once)
    assert session.status()["combine"].fired == 2


def test_a_graph_of_gradients_is_refused_by_name() -> None:
    model, x = Heads(), torch.randn(5, 6).requires_grad_()
    gradsurgeon.apply(model, on_heads({"action": "combine", **AVERAGE}))
    with pytest.raises(GradSurgeonError, match=r"rule combine: .*create_graph=True"):
        torch.autograd.grad(total(model, x), x, create_graph=True)


def test_reentrant_checkpoints_around_heads_are_refused() -> None:
    """Each head takes a tensor of its own there, so that nothing is shared."""
    model = Heads()
    gradsurgeon.apply(model, on_heads({"action": "combine", **AVERAGE}))
    features = model.trunk(torch.randn(5, 6))
    seg = checkpoint(model.seg, features, use_reentrant=True)
    depth = checkpoint(model.depth, features, use_reentrant=True)
    with pytest.raises(GradSurgeonError, match=r"rule combine: .*use_reentrant=False"):
        (seg.sum() + depth.sum()).backward()


def test_other_checkpoints_work() -> None:
    model, x = Heads(), torch.randn(5, 6)
    wanted = by_hand(model, x, "mgda", conflicting)
    gradsurgeon.apply(model, on_heads({"action": "combine", "method": "mgda"}))

    class Around(nn.Module):
        def forward(self, x: Tensor) -> Any:
            features = checkpoint(model.trunk, x, use_reentrant=False)
            seg = checkpoint(model.seg, features, use_reentrant=False)
            return seg, checkpoint(model.depth, features, use_reentrant=False)

    sum(conflicting(Around(), x).values()).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(
        flat_grads([*model.trunk.parameters()]), wanted, rtol=1e-9, atol=1e-12
    )


def test_a_whole_model_in_a_reentrant_checkpoint_works() -> None:
    model, x = Heads(), torch.randn(5, 6).requires_grad_()
    wanted = by_hand(model, x, "mgda", conflicting)
    gradsurgeon.apply(model, on_heads({"action": "combine", "method": "mgda"}))
    seg, depth = checkpoint(model, x, use_reentrant=True)
    losses = conflicting(lambda _: (seg, depth), x)  # type: ignore[arg-type]
    (losses["seg"] + losses["depth"]).backward()
    torch.testing.assert_close(
        flat_grads([*model.trunk.parameters()]), wanted, rtol=1e-9, atol=1e-12
    )


def test_a_head_that_works_in_place_is_said() -> None:
    class Model(Heads):
        def __init__(self) -> None:
            super().__init__()
            self.seg = nn.ReLU(inplace=True)

    model, x = Model(), torch.randn(5, 6)
    gradsurgeon.apply(model, on_heads({"action": "combine", **AVERAGE}))
    with pytest.warns(GradSurgeonWarning, match="seg works in place on the tensor that it shares"):
        model.seg(model.trunk(x)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*written in place:gradsurgeon.GradSurgeonWarning")
@pytest.mark.parametrize("action", ["combine", "conflict"])
def test_a_head_whose_first_layer_works_in_place_goes_on_as_before(action: str) -> None:
    class Model(Heads):
        def __init__(self) -> None:
            super().__init__()
            self.depth = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Any:
            features = self.trunk(x)
            depth = self.depth(features)
            return self.seg(features), depth

    model, x = Model(), torch.randn(5, 6)
    other = copy.deepcopy(model)
    total(other, x).backward()
    rule = {"action": "combine", **AVERAGE} if action == "combine" else {"action": action}
    gradsurgeon.apply(model, on_heads(rule))
    total(model, x).backward()
    torch.testing.assert_close(
        flat_grads([*model.trunk.parameters()]), flat_grads([*other.trunk.parameters()])
    )


def test_memory_does_not_grow_without_backward_passes() -> None:
    model = Heads()
    gradsurgeon.apply(model, on_heads({"action": "combine", **AVERAGE}, {"action": "conflict"}))
    alive: list[Any] = []
    model.trunk.register_forward_hook(lambda *call: alive.append(weakref.ref(call[2])))
    for _ in range(20):
        model(torch.randn(5, 6))
    with torch.no_grad():
        model(torch.randn(5, 6))
    with torch.inference_mode():
        model(torch.randn(5, 6))
    gc.collect()
    assert sum(one() is not None for one in alive) == 0


def test_memory_of_a_step_goes_with_it() -> None:
    model = Heads()
    gradsurgeon.apply(model, on_heads({"action": "combine", **AVERAGE}))
    alive: list[Any] = []
    model.trunk.register_forward_hook(lambda *call: alive.append(weakref.ref(call[2])))
    for _ in range(5):
        total(model, torch.randn(5, 6)).backward()
    gc.collect()
    assert sum(one() is not None for one in alive) == 0


def test_a_scaler_makes_no_difference() -> None:
    torch.set_default_dtype(torch.float32)
    model, x = Heads(), torch.randn(5, 6)
    wanted = by_hand(model, x, "fairgrad", conflicting)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    gradsurgeon.apply(model, on_heads({"action": "combine", "method": "fairgrad", "alpha": 1.0}))
    scaler.scale(sum(conflicting(model, x).values())).backward()  # type: ignore[arg-type]
    torch.testing.assert_close(
        flat_grads([*model.trunk.parameters()]) / 2**10, wanted, rtol=1e-3, atol=1e-4
    )


def test_a_nan_of_one_head_is_named_and_left_to_the_trap() -> None:
    model, x = Heads(), torch.randn(5, 6)
    file = on_heads({"action": "combine", "method": "pcgrad"})
    file["rules"].append({"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"})
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = gradsurgeon.apply(model, file)
    seg, depth = model(x)
    (seg.sum() * float("nan") + depth.sum()).backward()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    (said,) = [event.message for event in session.events if event.rule == "combine"]
    assert said.startswith("the gradient of seg is non-finite")


def test_both_forms_on_one_model() -> None:
    """Of the passes for single losses each head's part goes on as it is; the one that trains brings the features' own."""
    model, x = Heads(), torch.randn(5, 6)
    file = rules({"action": "conflict"})
    file["rules"] += on_heads({"action": "combine", "method": "mgda"})["rules"]
    wanted = by_hand(model, x, "mgda", conflicting)
    session = gradsurgeon.apply(model, file)
    gradsurgeon.backward(conflicting(model, x))
    torch.testing.assert_close(
        flat_grads([*model.trunk.parameters()]), wanted, rtol=1e-9, atol=1e-12
    )
    assert {rule: status.fired for rule, status in session.status().items()} == {
        "conflict": 1,
        "combine": 1,
    }


def test_copies_and_files_carry_nothing_and_it_leaves_no_trace() -> None:
    model, x = Heads(), torch.randn(5, 6)
    session = gradsurgeon.apply(model, on_heads({"action": "combine", **AVERAGE}))
    total(model, x).backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # our own
        assert not other.seg._forward_pre_hooks  # nobody else tells
    session.remove()
    assert not model.seg._forward_pre_hooks  # as above


def test_steps_and_counters_are_those_of_the_heads() -> None:
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = gradsurgeon.apply(
        model, on_heads({"action": "conflict", "steps": {"from": 1, "every": 2}})
    )
    for _ in range(5):
        optimizer.zero_grad()
        total(model, torch.randn(5, 6)).backward()
        optimizer.step()
    assert [step for step, _ in session.history("seg/depth", "cosine")] == [1, 3]


@pytest.mark.slow
@pytest.mark.no_cover
# Tracing what follows a graph break, torch warns about its own doing.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("when", ["before", "after the first call"])
def test_a_compiled_model_is_as_one_that_is_not(when: str) -> None:
    torch.set_default_dtype(torch.float32)
    torch._dynamo.reset()
    model, x = Heads(), torch.randn(5, 6)
    wanted = by_hand(model, x, "mgda", conflicting)
    called: Any = torch.compile(model, backend="aot_eager")
    if when != "before":
        called(x)
        with pytest.warns(GradSurgeonWarning, match="after the first compiled call"):
            gradsurgeon.apply(model, on_heads({"action": "combine", "method": "mgda"}))
    else:
        gradsurgeon.apply(model, on_heads({"action": "combine", "method": "mgda"}))
    sum(conflicting(called, x).values()).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(
        flat_grads([*model.trunk.parameters()]), wanted, rtol=1e-4, atol=1e-5
    )
