"""The trap names where a NaN was born and why: the right culprit, operation, cause and certainty."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 # as everybody calls it
from ranks import Json
from small import messages, rule_file, sgd, take_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon import Diagnosis, NonFiniteGradientError

INF = float("inf")
RULE: Json = {"id": "trap", "action": "nan-trap", "params": "*"}
TRAP = rule_file(RULE)
# In brief: what a logarithm of a negative number does in the body of `Net`.
LOG = ("reproduced", "NaN", "forward", "body", "aten.log", "mathematics")


class Body(nn.Module):
    """What stands between two layers, and can go wrong."""

    average: Tensor

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        # A replay is known by it where all that comes out is NaN.
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(x)
        self.average = self.average.lerp(x.detach().float().nanmean(), 0.1)
        return out


class Net(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.body = Body(act)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.body(self.first(x)))


def batch(number: int = 0) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(number))


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


@contextmanager
def stopped(model: nn.Module, rules: Any = TRAP, **options: Any) -> Iterator[list[Diagnosis]]:
    """Give the diagnosis of the trap that stops what is done inside."""
    diagnoses: list[Diagnosis] = []
    with (
        gradsurgeon.apply(model, rules, **options) as session,
        pytest.raises(NonFiniteGradientError) as caught,
    ):
        yield diagnoses
    diagnosis = caught.value.diagnosis
    assert isinstance(diagnosis, Diagnosis)
    assert str(diagnosis) in str(caught.value)
    assert any(str(diagnosis) in event.message for event in session.events)
    diagnoses.append(diagnosis)


def diagnosed(
    model: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor] = mean,
    rules: Any = TRAP,
    around: Callable[[], Any] = nullcontext,
    optimizer: torch.optim.Optimizer | None = None,
    before_step: Callable[[], object] = lambda: None,
) -> Diagnosis:
    """Return the diagnosis of one step that a trap has stopped; each input is one micro-batch."""
    owner = optimizer or sgd(model)
    with stopped(model, rules, optimizer=owner) as diagnoses:
        for given in inputs:
            with around():
                out = model(**given) if isinstance(given, dict) else model(given)
                value = loss(out)
            value.backward()
        before_step()
        owner.step()
    return diagnoses[0]


def fault(diagnosis: Diagnosis) -> str:
    assert diagnosis.cause is not None
    return diagnosis.cause.fault


def brief(diagnosis: Diagnosis) -> tuple[str, ...]:
    return (
        diagnosis.certainty,
        diagnosis.what,
        diagnosis.where,
        diagnosis.module,
        diagnosis.operation,
        fault(diagnosis),
    )


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        nothing = grad * 0
        return nothing / nothing


def masked(x: Tensor) -> Tensor:
    """Attend with a mask: a healthy minus infinity."""
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, 0] = True
    return x.masked_fill(mask, -INF).softmax(-1)


def attended(x: Tensor) -> Tensor:
    q = x.unsqueeze(0)
    mask = torch.triu(torch.full((len(x), len(x)), -INF), diagonal=1)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).squeeze(0)


BODY: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...], str]] = {
    "log of a negative": (
        torch.log,
        LOG,
        "",
    ),
    "sqrt at 0": (
        lambda x: (x * 0).sqrt(),
        ("reproduced", "Inf", "backward", "body", "aten.div", "mathematics"),
        "SqrtBackward0",
    ),
    "healthy masked softmax beside a NaN": (
        lambda x: masked(x) + x.log(),
        LOG,
        "",
    ),
    "healthy masked attention beside a NaN": (
        lambda x: attended(x) + x.log(),
        LOG,
        "",
    ),
    "masked by where, back in backward": (
        lambda x: torch.where(x > 0, x.sqrt(), torch.zeros_like(x)),
        ("reproduced", "NaN", "forward", "body", "aten.sqrt", "mathematics"),
        "",
    ),
    "finite forward, where and log at 0": (
        lambda x: torch.where(x > 9, (x * 0).log(), torch.zeros_like(x)),
        ("reproduced", "NaN", "backward", "body", "aten.div", "mathematics"),
        "LogBackward0",
    ),
    "a function of the script's": (
        BadBackward.apply,
        ("reproduced", "NaN", "backward", "body", "aten.div", "mathematics"),
        "BadBackwardBackward",
    ),
    "checkpoint": (
        lambda x: checkpoint(torch.log, x, use_reentrant=False),
        LOG,
        "",
    ),
    "in place": (
        lambda x: (x * 1).sqrt_(),
        ("reproduced", "NaN", "forward", "body", "aten.sqrt_", "mathematics"),
        "",
    ),
}


@pytest.mark.parametrize("case", BODY)
def test_the_operation_that_did_it_is_named(case: str) -> None:
    act, expected, node = BODY[case]
    torch.manual_seed(0)
    diagnosis = diagnosed(Net(act), batch())
    assert brief(diagnosis) == expected
    assert diagnosis.node == node
    assert diagnosis.module_type == "Body"
    (line, *_) = diagnosis.lines
    assert line.file == __file__
    if "function" not in case:
        assert "x" in line.text
    assert diagnosis.output is not None
    assert diagnosis.output.kind


def test_the_numbers_are_those_of_the_operation() -> None:
    model = Net(torch.log)
    with torch.no_grad():
        went_in = model.first(batch())
    diagnosis = diagnosed(model, batch())
    (facts,) = diagnosis.inputs
    assert (facts.name, facts.shape, facts.dtype) == ("self", (6, 4), "float32")
    assert (facts.low, facts.high) == (float(went_in.min()), float(went_in.max()))
    assert diagnosis.output is not None
    assert diagnosis.output.nan == int((went_in < 0).sum())
    # The last number before it is that of the layer in front.
    assert diagnosis.history[-1] == ("first: aten.addmm", float(went_in.abs().max()))


def nothing_by_nothing(out: Tensor) -> Tensor:
    return (out - out).sum() / (out - out).sum()


def test_attention_with_a_mask_that_stays_finite_is_not_blamed() -> None:
    diagnosis = diagnosed(Net(attended), batch(), loss=nothing_by_nothing)
    assert diagnosis.node == "DivBackward0"


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "0 / 0": (
        nothing_by_nothing,
        ("partial", "NaN", "forward", "", "aten.div", "mathematics"),
    ),
    "log of a negative": (
        lambda out: (out - 100).log().square().mean(),
        ("partial", "NaN", "forward", "", "aten.log", "mathematics"),
    ),
    "division in the middle": (
        lambda out: (out / (out - out)).abs().log().sum(),
        ("partial", "Inf", "forward", "", "aten.div", "mathematics"),
    ),
    "root of a negative": (
        lambda out: (out - 100).sqrt().mean(),
        ("partial", "NaN", "forward", "", "aten.sqrt", "unknown"),
    ),
    "too large for the format": (
        lambda out: (out.abs() + 1e30).square().square().mean(),
        ("partial", "Inf", "forward", "", "aten.pow", "overflow"),
    ),
    "squared errors too large for the format": (
        lambda out: F.mse_loss(out * 1e25, torch.zeros_like(out)),
        ("partial", "Inf", "forward", "", "aten.mse_loss", "overflow"),
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_the_operation_of_a_loss_outside_of_the_model_is_named(case: str) -> None:
    loss, expected = LOSSES[case]
    torch.manual_seed(0)
    diagnosis = diagnosed(Net(), batch(), loss=loss)
    assert brief(diagnosis) == expected
    assert diagnosis.reasons[0].startswith("the loss is computed outside of the model")
    assert diagnosis.lines == ()
    assert diagnosis.loss is not None
    assert not math.isfinite(diagnosis.loss)


def test_finite_outputs_whose_sum_is_too_large_are_an_overflow() -> None:
    model = Net(lambda x: x * 3e38)
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.fill_(0.05)
        model.last.weight.fill_(3.0)
    diagnosis = diagnosed(model, batch(), loss=torch.mean)
    assert brief(diagnosis) == ("partial", "Inf", "forward", "", "aten.mean", "overflow")
    assert "scale the input down" in str(diagnosis)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (1e4, ("partial", "Inf", "forward", "", "aten.exp", "unknown")),
        (1.0, ("reproduced", "Inf", "backward", "heads.0", "aten.mm", "overflow")),
    ],
)
def test_a_loss_that_is_infinite_comes_before_its_backward_pass(
    factor: float, expected: tuple[str, ...]
) -> None:

    def loss(outputs: list[Tensor]) -> Tensor:
        first, second = outputs
        # The gradient of the first head is finite, and that of its weight too large.
        return (second.abs() * factor).exp().sum() + (first - first.detach()).sum() * 3e38

    torch.manual_seed(0)
    diagnosis = diagnosed(TwoHeads(), batch().abs(), loss=loss)
    assert brief(diagnosis) == expected


def test_of_two_operations_alike_in_a_loss_it_is_said_which() -> None:

    def loss(out: Tensor) -> Tensor:
        p = (out * 200).softmax(-1).clamp(min=1e-6)
        return -(p.log() + (1 - p).log()).mean()

    diagnosis = diagnosed(Net(), batch(), loss=loss)
    assert diagnosis.node == "LogBackward0, number 2 of 2"
    diagnosis = diagnosed(Net(), batch(), loss=lambda out: (out - out).log().sum())
    assert diagnosis.node == "LogBackward0"


def test_a_loss_that_is_finite_and_goes_wrong_in_backward() -> None:
    diagnosis = diagnosed(Net(), batch(), loss=lambda out: (out - out).sqrt().sum())
    assert brief(diagnosis) == ("partial", "Inf", "backward", "", "aten.sqrt", "mathematics")
    assert diagnosis.loss == 0.0
    assert diagnosis.loss_nodes == ("SubBackward0", "SqrtBackward0", "SumBackward0")
    assert diagnosis.cause is not None
    assert diagnosis.cause.advice == "the derivative at 0 is infinite: write `(x + eps).sqrt()`"


def test_the_input_was_bad() -> None:
    bad = batch()
    bad[2, 1] = float("nan")
    diagnosis = diagnosed(Net(), bad)
    assert (diagnosis.certainty, diagnosis.where, diagnosis.name) == (
        "reproduced",
        "input",
        "x",
    )
    assert "the input x of the root (Net) was not finite when the model was called (NaN)" in str(
        diagnosis
    )
    assert fault(diagnosis) == "bad input"
    assert diagnosis.output is not None
    assert (diagnosis.output.nan, diagnosis.output.numel) == (1, 24)


def test_one_row_of_an_embedding_was_bad() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    with torch.no_grad():
        next(model.parameters())[7] = float("nan")
    diagnosis = diagnosed(model, torch.tensor([1, 7, 3]))
    assert (diagnosis.where, diagnosis.name, fault(diagnosis)) == (
        "weight",
        "0.weight",
        "bad input",
    )
    assert diagnosis.output is not None
    assert diagnosis.output.nan == 4


def test_autocast_is_as_it_was() -> None:
    around = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    diagnosis = diagnosed(Net(torch.log), batch(), around=around)
    assert brief(diagnosis) == LOG
    assert diagnosis.inputs[0].dtype == "bfloat16"


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, *, batch: Any, scale: float = 1.0) -> Any:
        return {"logits": self.layer(batch.x * scale).log(), "extra": [batch.x]}


@dataclasses.dataclass
class Batch:
    x: Tensor


def test_structures_of_inputs_and_outputs() -> None:
    given = {"batch": Batch(batch()), "scale": 2.0}
    diagnosis = diagnosed(Structured(), given, loss=lambda out: mean(out["logits"]))
    assert brief(diagnosis) == ("reproduced", "NaN", "forward", ".", "aten.log", "mathematics")


class LossInside(nn.Module):
    """As models of transformers: the loss and what it is made of come out together."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": (logits * 0).sqrt().sum(), "logits": logits}


def test_a_loss_that_the_model_returns_is_run_back_once() -> None:
    diagnosis = diagnosed(LossInside(), batch(), loss=lambda out: out["loss"])
    assert brief(diagnosis) == ("reproduced", "Inf", "backward", ".", "aten.div", "mathematics")


def test_a_module_that_is_called_twice() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Any:
            return self.last(self.body(self.body(self.first(x)).abs() - 0.4).abs())

    def once(x: Tensor) -> Tensor:
        return x.log() if bool((x < 0).any()) and bool((x > -0.4).all()) else x.tanh()

    diagnosis = diagnosed(Twice(once), batch())
    assert brief(diagnosis) == LOG
    assert diagnosis.inputs[0].low is not None
    assert diagnosis.inputs[0].low >= -0.4


def test_the_third_of_four_micro_batches() -> None:
    act = lambda x: torch.where(x.detach().max() > 50, x.log(), x)  # noqa: E731
    batches = [batch(number) for number in range(4)]
    batches[2] *= 100
    diagnosis = diagnosed(Net(act), *batches)
    assert (diagnosis.micro_batch, diagnosis.micro_batches) == (3, 4)
    assert brief(diagnosis) == LOG


def test_the_script_has_clipped_before_the_step() -> None:
    model = Net(lambda x: (x * 0).sqrt())
    diagnosis = diagnosed(
        model,
        batch(),
        before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )
    assert brief(diagnosis)[:5] == ("reproduced", "Inf", "backward", "body", "aten.div")


def test_a_scaled_loss() -> None:
    model = Net(torch.log)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    rules = rule_file({**RULE, "give_up_after": 1})
    with stopped(model, rules, optimizer=optimizer, scaler=scaler) as diagnoses:
        scaler.scale(mean(model(batch()))).backward()
        scaler.step(optimizer)
    assert (diagnoses[0].scale, diagnoses[0].operation) == (8.0, "aten.log")


@pytest.mark.parametrize("what", ["output", "tag"])
def test_a_trap_on_modules_and_tags_gets_the_same(what: str) -> None:

    def act(x: Tensor) -> Tensor:
        return gradsurgeon.tag(x.log(), "hidden").nan_to_num(0.0)

    rule = {"id": "trap", "action": "nan-trap"}
    rule |= (
        {"modules": "body", "tensor": "output"}
        if what == "output"
        else {"tensors": "hidden", "tensor": "value"}
    )
    model = Net(torch.log if what == "output" else act)
    diagnosis = diagnosed(model, batch(), rules=rule_file(rule))
    assert brief(diagnosis)[1:5] == ("NaN", "forward", "body", "aten.log")


def test_a_state_that_has_moved_on_blames_nobody() -> None:
    bad = [True]

    def act(x: Tensor) -> Tensor:
        return x.log() if bad[0] else x

    diagnosis = diagnosed(Net(act), batch(), before_step=lambda: bad.__setitem__(0, False))
    assert diagnosis.certainty == "not reproduced"
    assert (diagnosis.operation, diagnosis.where, diagnosis.cause) == ("", "", None)
    assert "other outputs than the call" in diagnosis.reasons[0]


@contextmanager
def another_hardswish(kernel: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Put another kernel in the place of an operation."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings(action="ignore"):
            library.impl("hardswish", kernel, "CPU")
        yield


def test_a_fault_that_repeating_does_not_show_is_transient() -> None:
    calls = []

    def flaky(x: Tensor) -> Tensor:
        # Wrong in the run and in the replay, and right when it is repeated.
        calls.append(x.dtype)
        return x * float("nan") if len(calls) <= 2 else x * 1

    torch.manual_seed(0)
    with another_hardswish(flaky):
        diagnosis = diagnosed(Net(F.hardswish), batch())
    assert brief(diagnosis) == (
        "reproduced",
        "NaN",
        "forward",
        "body",
        "aten.hardswish",
        "transient",
    )


def test_a_kernel_that_is_wrong_in_one_implementation() -> None:
    def wrong(x: Tensor) -> Tensor:
        right = x * (x + 3).clamp(0, 6) / 6
        return right.log() * 0 if x.dtype == torch.float32 else right

    torch.manual_seed(0)
    with another_hardswish(wrong):
        diagnosis = diagnosed(Net(F.hardswish), batch())
    assert brief(diagnosis) == ("reproduced", "NaN", "forward", "body", "aten.hardswish", "kernel")


def test_calls_beyond_the_bytes_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradsurgeon.forensics import kept_step

    torch.manual_seed(0)
    # The states of the random numbers are most of a call: one fits.
    monkeypatch.setattr(kept_step, "MAX_BYTES", 70_000)
    diagnosis = diagnosed(Net(torch.log), *map(batch, range(4)))
    assert diagnosis.certainty == "partial"
    assert "3 of the calls of this step were not kept" in diagnosis.reasons[0]
    assert (diagnosis.micro_batch, diagnosis.micro_batches) == (4, 4)


def test_a_replay_that_raises_is_said_and_the_step_is_stopped_all_the_same() -> None:
    times = [0]

    def act(x: Tensor) -> Tensor:
        times[0] += 1
        if times[0] > 1:
            raise RuntimeError("only once")
        return x.log()

    diagnosis = diagnosed(Net(act), batch())
    assert diagnosis.certainty == "not reproduced"
    assert diagnosis.reasons == ("the replay raised RuntimeError: only once",)


def test_only_the_first_trip_of_a_rule_is_diagnosed() -> None:
    model = Net(torch.log)
    optimizer = sgd(model)
    rules = rule_file({**RULE, "then": "skip-step"})
    with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
        for _ in range(3):
            take_step(optimizer, mean(model(batch())))
        traps = messages(session, "trap")
        assert ["diagnosis" in text for text in traps] == [True, False, False]
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


def test_without_forensics_nothing_is_kept() -> None:
    model = Net(torch.log)
    rules = rule_file({**RULE, "forensics": False})
    optimizer = sgd(model)
    with gradsurgeon.apply(model, rules, optimizer=optimizer):
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        mean(model(batch())).backward()
        with pytest.raises(NonFiniteGradientError) as caught:
            optimizer.step()
    assert caught.value.diagnosis is None
    assert "diagnosis" not in str(caught.value)


def test_a_compiled_model_is_diagnosed_without_the_compiler() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = torch.compile(Net(torch.log), backend="eager", fullgraph=True)
    diagnosis = diagnosed(model, batch())
    assert brief(diagnosis) == ("partial", "NaN", "forward", "body", "aten.log", "mathematics")
    assert diagnosis.reasons == (
        "the model was compiled, and the replay ran it without the compiler",
    )


@pytest.mark.parametrize("how", ["by torch.compile", "in place"])
def test_no_graph_breaks_at_what_keeps_calls(how: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Net(torch.log)
    optimizer = sgd(model)
    with stopped(model, optimizer=optimizer) as diagnoses:
        if how == "in place":
            model.compile(backend="eager", fullgraph=True)
            called = model
        else:
            called = torch.compile(model, backend="eager", fullgraph=True)
        mean(called(batch())).backward()
        optimizer.step()
    assert diagnoses[0].certainty == "not reproduced"
    text = "apply the rules to the module that torch.compile returned"
    assert text in diagnoses[0].reasons[0]


def test_hooks_of_the_script_run_in_each_replay_and_on_the_same() -> None:
    model = Net(lambda x: x)
    seen: list[float] = []
    model.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))

    def note(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
        seen.append(float(out.detach().sum()))
        return out.log()

    model.body.register_forward_hook(note)
    diagnosis = diagnosed(model, batch())
    # A hook runs after the module that it is on.
    assert brief(diagnosis)[:5] == ("reproduced", "NaN", "forward", ".", "aten.log")
    assert diagnosis.lines[-1].function == "note"
    # The call, the replay, and the replay with a clamp in the hook.
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]


def test_the_parts_of_a_model_without_a_forward_pass_are_run_again() -> None:
    model = nn.ModuleDict({"net": Net(torch.log)})
    optimizer = sgd(model)
    with stopped(model, optimizer=optimizer) as diagnoses:
        take_step(optimizer, mean(model["net"](batch())))
    assert brief(diagnoses[0]) == ("reproduced", "NaN", "forward", "net.body", *LOG[4:])
