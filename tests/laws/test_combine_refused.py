"""What `gradsurgeon.backward` cannot do is refused by name, before a weight moves; nothing of it is silent."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from several_losses import (
    Checkpointed,
    Embedding,
    Heads,
    flat_grads,
    grads_of,
    jacobian,
    rules,
    trunk_of,
    two,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon import BindError, GradSurgeonError

COMBINE = {"action": "combine", "method": "mgda"}


class WritesItsSaved(torch.autograd.Function):
    """Works once: its backward pass leaves something else in what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.factor = [1.0]
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.factor[0] *= 10.0
        return grad * ctx.factor[0]


class Unrepeatable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Any:
        return WritesItsSaved.apply(self.up(x))


@pytest.mark.parametrize("action", ["combine", "conflict"])
def test_a_graph_that_cannot_be_gone_through_twice(action: str) -> None:
    model, x = Heads(Unrepeatable()), torch.randn(5, 6)
    rule = COMBINE if action == "combine" else {"action": "conflict"}
    gradsurgeon.apply(model, rules(rule))
    with pytest.raises(
        GradSurgeonError, match=rf"rule {action}: .*trunk.up.weight do not add up .* twice"
    ):
        gradsurgeon.backward(two(model, x))


@pytest.mark.parametrize("action", ["combine", "conflict"])
def test_a_reentrant_checkpoint(action: str) -> None:
    model, x = Heads(Checkpointed(reentrant=True)), torch.randn(5, 6)
    rule = COMBINE if action == "combine" else {"action": "conflict"}
    gradsurgeon.apply(model, rules(rule))
    with pytest.raises(GradSurgeonError, match="use_reentrant=False"):
        gradsurgeon.backward(two(model, x))


@pytest.mark.parametrize("action", ["combine", "conflict"])
def test_a_reentrant_checkpoint_around_a_head(action: str) -> None:
    class Reentrant(Heads):
        def forward(self, x: Tensor) -> Any:
            features = self.trunk(x)
            return checkpoint(self.seg, features, use_reentrant=True), self.depth(features)

    model, x = Reentrant(), torch.randn(5, 6)
    gradsurgeon.apply(model, rules(COMBINE if action == "combine" else {"action": "conflict"}))
    with pytest.raises(GradSurgeonError, match=r"of the loss seg .* use use_reentrant=False"):
        gradsurgeon.backward(two(model, x))


def test_a_first_gradient_that_is_not_finite_does_not_vouch_for_the_graph() -> None:
    model, x = Heads(Unrepeatable()), torch.randn(5, 6)
    gradsurgeon.apply(model, rules(COMBINE))
    losses = two(model, x)
    gradsurgeon.backward({**losses, "seg": losses["seg"] * torch.nan})
    model.zero_grad()
    with pytest.raises(GradSurgeonError, match="do not add up"):
        gradsurgeon.backward(two(model, x))


def test_a_sparse_gradient_before_anything_has_accumulated() -> None:
    model, x = Heads(Embedding(sparse=True)), torch.randn(5, 6)
    with pytest.raises((GradSurgeonError, BindError), match=r"sparse.*exclude"):
        gradsurgeon.apply(model, rules(COMBINE))
        gradsurgeon.backward(two(model, x))
    assert all(param.grad is None for param in model.parameters())


def test_losses_of_a_graph_that_is_gone_say_what_torch_says() -> None:
    model, x = Heads(), torch.randn(5, 6)
    gradsurgeon.apply(model, rules(COMBINE))
    losses = two(model, x)
    gradsurgeon.backward(losses)
    with pytest.raises(RuntimeError, match="second time"):
        gradsurgeon.backward(losses)


@pytest.mark.parametrize("method", ["krum", "upgrad"])
def test_weights_that_cannot_be_had_leave_the_sum_and_say_so(method: str, monkeypatch: Any) -> None:
    options: dict[str, Any] = {"losses": ["seg", "depth", "third"]}
    options |= {"n_byzantine": 0} if method == "krum" else {}
    model, x = Heads(), torch.randn(5, 6)
    expected = copy.deepcopy(model)
    sum(two(expected, x).values()).backward()  # type: ignore[union-attr]
    gradsurgeon.apply(model, rules({"action": "combine", "method": method, **options}))
    if method == "upgrad":
        import torchjd.linalg

        def fail(*_: object) -> None:
            raise ValueError("Failed to solve the quadratic programming problem.")

        monkeypatch.setattr(torchjd.linalg.QuadprogProjector, "_project_weight_vector", fail)
        with pytest.warns(gradsurgeon.GradSurgeonWarning, match=r"Failed to solve .* plain sum"):
            gradsurgeon.backward(two(model, x))
        torch.testing.assert_close(flat_grads(trunk_of(model)), flat_grads(trunk_of(expected)))
    else:  # a loss that is not there counts as a gradient of zeros
        gradsurgeon.backward(two(model, x))


@pytest.mark.slow
def test_a_missing_library_names_the_extra() -> None:
    script = (
        "import sys\n"
        "sys.modules['torchjd'] = None\n"
        "sys.modules['torchjd.aggregation'] = None\n"
        "import gradsurgeon\n"
        "from several_losses import Heads, rules\n"
        "gradsurgeon.apply(Heads(), rules({'action': 'conflict'})).remove()\n"
        "gradsurgeon.apply(Heads(), rules({'action': 'combine', 'method': 'mgda'}))\n"
    )
    done = subprocess.run(  # our own script
        [sys.executable, "-c", script], capture_output=True, text=True, cwd="tests", check=False
    )
    assert done.returncode == 1
    assert "rule combine: `method: mgda` needs the library torchjd.aggregation" in done.stderr
    assert "pip install 'gradsurgeon[surgery]'" in done.stderr


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("what", ["the model", "the trunk"])
def test_a_compiled_model_works_or_is_refused_by_name(what: str, kept: bool) -> None:  # a case
    from torch._functorch import config

    torch._dynamo.reset()
    model, x = Heads(), torch.randn(5, 6)
    matrix = jacobian(two(model, x), trunk_of(model))
    aggregation = pytest.importorskip("torchjd.aggregation")
    wanted = aggregation.MGDA()(matrix)
    called: Any = model
    with config.patch(donated_buffer=not kept):
        if what == "the model":
            called = torch.compile(model, backend="aot_eager")
        else:
            model.trunk.compile(backend="aot_eager")
        gradsurgeon.apply(model, rules(COMBINE))
        losses = two(called, x)
        if kept:
            gradsurgeon.backward(losses)
            torch.testing.assert_close(flat_grads(trunk_of(model)), wanted, rtol=1e-4, atol=1e-6)
            return
        try:
            gradsurgeon.backward(losses)
            said = ""
        except GradSurgeonError as error:
            said = str(error)
        # What saves nothing that it could free goes through.
        assert "donated_buffer = False" in said or not said
        if said:
            assert all(param.grad is None for param in model.parameters())
        else:
            torch.testing.assert_close(flat_grads(trunk_of(model)), wanted, rtol=1e-4, atol=1e-6)


def test_create_graph_in_the_script_goes_on_working() -> None:
    """The pass itself makes no graph: what needs one is a loss of its own."""
    model, x = Heads(), torch.randn(5, 6)
    gradsurgeon.apply(model, rules(COMBINE))
    gradsurgeon.backward(two(model, x))
    assert all(param.grad is None or not param.grad.requires_grad for param in model.parameters())


def test_threads_train_models_of_their_own() -> None:
    models = [Heads() for _ in range(4)]
    batches = [torch.randn(5, 6) for _ in models]
    aggregation = pytest.importorskip("torchjd.aggregation")
    wanted = [
        aggregation.MGDA()(jacobian(two(model, x), trunk_of(model)))
        for model, x in zip(models, batches, strict=True)
    ]
    for model in models:
        gradsurgeon.apply(model, rules(COMBINE))
    errors: list[BaseException] = []

    def train(model: nn.Module, x: Tensor) -> None:
        try:
            for _ in range(10):
                model.zero_grad()
                gradsurgeon.backward(two(model, x))
        except BaseException as error:  # noqa: BLE001 # shown below
            errors.append(error)

    threads = [
        threading.Thread(target=train, args=pair) for pair in zip(models, batches, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for model, one in zip(models, wanted, strict=True):
        torch.testing.assert_close(flat_grads(trunk_of(model)), one, rtol=1e-4, atol=1e-6)


def test_an_exception_in_a_hook_leaves_the_hooks_as_they_were() -> None:
    model, x = Heads(), torch.randn(5, 6)
    weight = model.trunk[0].weight
    weight.register_hook(lambda grad: grad)
    hooks = dict(weight._backward_hooks)  # nobody else tells
    gradsurgeon.apply(model, rules(COMBINE))
    features = model.trunk(x)

    def fail(_grad: Tensor) -> None:
        raise ZeroDivisionError("in a hook")

    features.register_hook(fail)
    losses = {"seg": model.seg(features).mean(), "depth": model.depth(features).square().mean()}
    with pytest.raises(ZeroDivisionError):
        gradsurgeon.backward(losses)
    assert dict(weight._backward_hooks) == hooks  # as above
    model.zero_grad()
    gradsurgeon.backward(two(model, x))
    assert grads_of(model)["trunk.0.weight"] is not None
