"""While a backward pass runs, no frame of the package is on the stack: tracebacks and warnings are the script's."""

from __future__ import annotations

import gc
import logging
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import same
from small import attach, rule_file, sgd, take_step, weights_of
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import gradsurgeon

RULES = rule_file(
    {"id": "contributions", "action": "norm-log", "params": "*", "at": "backward"},
    {"id": "norms", "action": "norm-log", "params": "*"},
    {"id": "trap", "action": "nan-trap", "params": "*"},
    {"id": "inputs", "action": "norm-log", "modules": "*", "tensor": "input.grad"},
)


NOTHING: dict[str, int] = {}


class Bad(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        raise ValueError("of the script")


def forward(model: nn.Module) -> Any:
    return model(torch.ones(2, 3)).sum()


def frames(stack: traceback.StackSummary) -> list[str]:
    return [f"{one.filename}:{one.name}" for one in stack]


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


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh())


def stacks_of_a_hook(model: Any, run: Callable[[nn.Module], object]) -> list[list[str]]:
    """Return the stack at each call of a hook that stands on the output of the last layer."""
    stacks: list[list[str]] = []

    def look(_module: nn.Module, _args: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: stacks.append(frames(traceback.extract_stack())))

    handle = model[1].register_forward_hook(look)
    with warnings.catch_warnings(action="ignore"):
        run(model)
    handle.remove()
    return stacks


@pytest.mark.parametrize("name", PASSES)
def test_a_hook_has_the_stack_that_it_has_without(name: str, model: nn.Module) -> None:
    plain = stacks_of_a_hook(model, PASSES[name])
    model.zero_grad()
    with gradsurgeon.apply(model, RULES) as session:
        assert stacks_of_a_hook(model, PASSES[name]) == plain
        assert session.status()["inputs"].fired


@pytest.mark.parametrize("handled", [False, True], ids=["alone", "while another error is handled"])
def test_an_error_in_backward_has_the_frames_that_it_has_without(
    handled: bool, model: nn.Module
) -> None:
    def while_handled(run: Callable[[], object]) -> None:
        try:
            NOTHING["before"]
        except KeyError:
            run()

    def fail() -> None:
        Bad.apply(model(torch.ones(2, 3))).sum().backward()

    def failed() -> list[str]:
        with pytest.raises(ValueError, match="of the script") as caught:
            if handled:
                while_handled(fail)
            else:
                fail()
        assert isinstance(caught.value.__context__, KeyError) is handled
        return frames(traceback.extract_tb(caught.tb))

    plain = failed()
    with gradsurgeon.apply(model, RULES) as session:
        assert failed() == plain
        assert not session.status()["trap"].fired
        # A pass that ends well is not taken for one that failed because an error is being handled.
        while_handled(forward(model).backward)
        assert session.status()["norms"].fired == 2


def test_a_warning_in_backward_names_the_line_of_the_script(model: nn.Module) -> None:
    model[0].register_full_backward_hook(lambda *_: None)  # type: ignore[index]
    with gradsurgeon.apply(model, RULES), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        forward(model).backward()
    assert [one.filename for one in seen if "Full backward hook" in str(one.message)] == [__file__]


@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_torch_logs_the_nodes_that_run_as_it_would(
    level: int, model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(level, "torch.autograd.graph"):
        forward(model).backward()
        plain = caplog.text.count("Executing:")
        with attach(model, *RULES["rules"][:1]):
            forward(model).backward()
    assert caplog.text.count("Executing:") == 2 * plain
    assert (plain > 0) is (level == logging.DEBUG)


def test_an_error_of_a_rule_after_the_pass_is_alone(model: nn.Module) -> None:
    rules = rule_file({**RULES["rules"][2], "then": "raise"})
    with (
        gradsurgeon.apply(model, rules),
        warnings.catch_warnings(action="ignore"),
        pytest.raises(gradsurgeon.NonFiniteGradientError) as caught,
    ):
        (forward(model) * float("nan")).backward()
    assert caught.value.__context__ is None
    # What torch keeps for a running pass must not outlive it: the process would abort when the thread ends.
    is_kept = getattr(torch._C, "_is_key_in_tls", lambda _: False)
    assert not is_kept("context")


def test_the_loss_of_a_pass_is_let_go_of_at_once(model: nn.Module) -> None:
    loss = forward(model)
    held = weakref.ref(loss)
    gc.collect()
    gc.disable()
    try:
        with attach(model, *RULES["rules"][:1]):
            loss.backward()
            del loss
            assert held() is None
    finally:
        gc.enable()


# -------------------------------------------------------------------------------------------------
# What a script does with gradients before a backward pass is over, or after it has raised, sees the rules acted.
#
# Each case is compared with hooks that are written by hand.
# -------------------------------------------------------------------------------------------------


BOUND = {"id": "bound", "action": "clamp", "params": "*", "at": "backward", "min": -0.1, "max": 0.1}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def loss_of(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    loss: Tensor = 50 * model(torch.randn(5, 4)).square().sum()
    return loss


def held_against_hooks(case: Callable[[nn.Sequential], list[Tensor]]) -> None:
    by_hand = make()
    by_rule = make()
    for param in by_hand.parameters():
        param.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    expected = case(by_hand)
    with attach(by_rule, BOUND):
        found = case(by_rule)
    assert len(found) == len(expected) > 0
    assert same(found, expected)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


class Inside(torch.autograd.Function):
    """Hands its input on, and does something in the middle of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], object]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.act()
        return grad, None


def stopped(model: nn.Sequential, act: Callable[[], object]) -> Tensor:
    hidden = Inside.apply(model[:2](torch.ones(5, 4)), act)
    loss: Tensor = 50 * model[2:](hidden).square().sum()
    return loss


def test_a_step_within_the_pass_consumes_what_rules_have_edited() -> None:
    def case(model: nn.Sequential) -> list[Tensor]:
        optimizer = sgd(model, 0.5)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            stopped(model, step).backward()
            step()
        return weights_of(model)

    held_against_hooks(case)


def test_a_hook_on_one_parameter_finds_the_others_edited() -> None:
    def case(model: nn.Sequential) -> list[Tensor]:
        found: list[Tensor] = []
        first = next(model.parameters())
        first.register_post_accumulate_grad_hook(lambda _: found.extend(grads_of(model)))
        loss_of(model).backward()
        return found

    held_against_hooks(case)


def test_a_hook_on_a_parameter_without_rules_finds_the_others_edited() -> None:
    model = make()
    found = list[Tensor]()
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda _: found.extend(grads_of(model)[-2:]))
    with attach(model, {**BOUND, "params": "4.*"}):
        loss_of(model).backward()
    assert found
    assert all(grad.abs().max() <= 0.1 for grad in found)


def test_a_pass_that_raises_leaves_edited_gradients() -> None:
    def case(model: nn.Sequential) -> list[Tensor]:
        def fail() -> None:
            raise MemoryError

        with pytest.raises(MemoryError):
            stopped(model, fail).backward()
        return grads_of(model)

    held_against_hooks(case)


def test_a_model_that_is_trained_within_the_pass_of_another_is_edited_there() -> None:
    def case(model: nn.Sequential) -> list[Tensor]:
        found: list[Tensor] = []

        def train() -> None:
            loss_of(model).backward()
            found.extend(grads_of(model))

        stopped(make(), train).backward()
        return found

    held_against_hooks(case)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_sessions_that_share_parameters_see_one_another_s_edits(order: tuple[int, int]) -> None:
    model = make()
    log = {"id": "log", "action": "norm-log", "params": "*", "stats": ["linf"]}
    wanted: list[tuple[nn.Module, Any]] = [(model[0], log), (model, BOUND)]
    sessions = [attach(*wanted[number]) for number in order]
    loss_of(model).backward()
    ((_, largest),) = sessions[order.index(0)].history("weight", "linf")
    for session in sessions:
        session.remove()
    assert largest == pytest.approx(0.1)


def test_a_rule_that_saw_nothing_keeps_its_last_step() -> None:
    model = make()
    optimizer = sgd(model)
    first = {**BOUND, "params": "0.*"}
    last = {**BOUND, "id": "last", "params": "4.*"}
    with attach(model, first, last) as session:
        take_step(optimizer, loss_of(model))
        take_step(optimizer, model[0](torch.ones(1, 4)).sum())
        status = session.status()
    assert (status["bound"].last_step, status["last"].last_step) == (1, 0)


def test_captured_contributions_come_in_the_order_of_the_pass() -> None:
    model = make()
    keep = {"id": "keep", "action": "capture", "params": "*", "at": "backward"}
    with attach(model, keep) as session:
        loss_of(model).backward()
        names = [name for name, _, _ in session.captured("keep")]
    assert names[0].startswith("4.")
    assert names[-1].startswith("0.")
    assert len(names) == 6


def test_a_gradient_that_is_taken_away_within_a_pass_is_edited() -> None:
    model = nn.Linear(3, 3)
    taken = list[Any]()

    def take(*_: object) -> None:
        taken.append(model.weight.grad)
        model.weight.grad = None

    node = get_gradient_edge(model.weight).node
    node.register_hook(take)
    rule = {"id": "half", "action": "scale", "params": "*", "at": "backward", "factor": 0.5}
    with attach(model, rule, optimizer=[]):
        model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(taken[0], torch.full((3, 3), 0.5))
