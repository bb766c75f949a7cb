"""While a backward pass runs, no frame of ours is on the stack: tracebacks and warnings are the script's."""

from __future__ import annotations

import gc
import io
import logging
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon import _backward_calls

RULES = {
    "version": 1,
    "rules": [
        {"id": "contributions", "action": "norm-log", "params": "*", "at": "backward"},
        {"id": "norms", "action": "norm-log", "params": "*"},
        {"id": "trap", "action": "nan-trap", "params": "*"},
        {"id": "inputs", "action": "norm-log", "modules": "*", "tensor": "input.grad"},
    ],
}


NOTHING: dict[str, int] = {}


class Bad(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        raise ValueError("of the script")


def forward(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(2, 3)).sum()
    return loss


def by_grad(model: nn.Module) -> None:
    torch.autograd.grad(forward(model), list(model.parameters()))


def checkpointed(model: nn.Module) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(model, x, use_reentrant=True).sum().backward()


PASSES: dict[str, Callable[[nn.Module], object]] = {
    "backward": lambda model: forward(model).backward(),
    "grad": by_grad,
    "several": lambda model: torch.autograd.backward([forward(model), forward(model)]),
    "create_graph": lambda model: forward(model).backward(create_graph=True),
    "reentrant": checkpointed,
}


def stack(frame: FrameType | None) -> list[str]:
    return [f"{one.filename}:{one.name}" for one in traceback.extract_stack(frame)]


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh())


def seen_by_a_hook(model: nn.Module, run: Callable[[nn.Module], object]) -> list[list[str]]:
    seen: list[list[str]] = []

    def look(_module: nn.Module, _args: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: seen.append(stack(sys._getframe())))

    handle = model[1].register_forward_hook(look)  # type: ignore[index]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(model)
    handle.remove()
    return seen


@pytest.mark.parametrize("name", PASSES)
def test_a_hook_has_the_stack_that_it_has_without(name: str, model: nn.Module) -> None:
    plain = seen_by_a_hook(model, PASSES[name])
    model.zero_grad()
    with gradsurgeon.apply(model, RULES) as session:
        assert seen_by_a_hook(model, PASSES[name]) == plain
        assert session.status()["inputs"].fired


@pytest.mark.parametrize("handled", [False, True], ids=["alone", "while another error is handled"])
def test_an_error_in_backward_has_the_frames_that_it_has_without(
    handled: bool, model: nn.Module
) -> None:
    def frames() -> list[str]:
        with pytest.raises(ValueError, match="of the script") as caught:
            if handled:
                try:
                    NOTHING["before"]
                except KeyError:
                    Bad.apply(model(torch.ones(2, 3))).sum().backward()
            else:
                Bad.apply(model(torch.ones(2, 3))).sum().backward()
        assert isinstance(caught.value.__context__, KeyError) is handled
        return [f"{one.filename}:{one.name}" for one in traceback.extract_tb(caught.tb)][1:]

    plain = frames()
    with gradsurgeon.apply(model, RULES) as session:
        assert frames() == plain
        assert not session.status()["trap"].fired
        # A pass that ends well is not taken for one that failed because an error is being handled.
        try:
            NOTHING["before"]
        except KeyError:
            forward(model).backward()
        assert session.status()["norms"].fired == 2


def test_a_warning_in_backward_names_the_line_of_the_script(model: nn.Module) -> None:
    model[0].register_full_backward_hook(lambda *_: None)  # type: ignore[index]
    with gradsurgeon.apply(model, RULES), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        forward(model).backward()
    assert [one.filename for one in seen if "Full backward hook" in str(one.message)] == [__file__]


def test_an_error_of_a_rule_after_the_pass_is_alone(model: nn.Module) -> None:
    rules = {"version": 1, "rules": [{**RULES["rules"][2], "then": "raise"}]}  # type: ignore[index]
    with gradsurgeon.apply(model, rules), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(gradsurgeon.NonFiniteGradientError) as caught:
            (forward(model) * float("nan")).backward()
    assert caught.value.__context__ is None


def test_the_loss_of_a_pass_is_let_go_of_at_once(model: nn.Module) -> None:
    loss = forward(model)
    held = weakref.ref(loss)
    gc.collect()
    gc.disable()
    try:
        with gradsurgeon.apply(model, {"version": 1, "rules": RULES["rules"][:1]}):  # type: ignore[index]
            loss.backward()
            del loss
            assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_torch_logs_the_nodes_that_run_as_it_would(level: int, model: nn.Module) -> None:
    logger = logging.getLogger("torch.autograd.graph")
    before, written = (logger.level, logger.propagate), io.StringIO()
    handler = logging.StreamHandler(written)
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(level)
    try:
        forward(model).backward()
        plain = written.getvalue().count("Executing:")
        with gradsurgeon.apply(model, {"version": 1, "rules": RULES["rules"][:1]}):  # type: ignore[index]
            forward(model).backward()
        assert written.getvalue().count("Executing:") == 2 * plain
        assert (plain > 0) is (level == logging.DEBUG)
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def test_rules_act_at_the_price_of_a_frame_where_torch_calls_no_pair_of_functions(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_backward_calls, "_logs_nodes", False)
    run = vars(torch.autograd)["_engine_run_backward"]
    with gradsurgeon.apply(model, RULES) as session:
        forward(model).backward()
        assert session.status()["contributions"].fired == 2
    assert vars(torch.autograd)["_engine_run_backward"] is run
