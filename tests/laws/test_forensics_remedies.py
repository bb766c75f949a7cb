"""Each operation that is known to make NaN is named, and has a remedy of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 # as everybody calls it
from laws.test_forensics import Net, batch, diagnosed, fault, stopped
from small import take_step
from torch import Tensor, nn

from gradsurgeon.common.diagnosis import Cause

INF = float("inf")
GENERAL = (
    "has no finite result for these numbers in any format",
    "values are too large for the format",
)


def ignored(x: Tensor) -> Tensor:
    return x * F.cross_entropy(x, torch.full((len(x),), -100))


def kept_open(x: Tensor) -> Tensor:
    return x.masked_fill(torch.arange(len(x))[:, None] == 1, -INF)


# By what happens: the body of the model, the operation, whether the backward pass makes it, a part of the remedy.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], str, bool, str]] = {
    "root of a negative": (lambda x: x.sqrt(), "aten.sqrt", False, "clamp(min=0)"),
    "root of 0": (lambda x: (x * 0).sqrt(), "aten.div", True, "(x + eps).sqrt()"),
    "logarithm of a negative": (lambda x: x.log(), "aten.log", False, "log_softmax"),
    "0 log 0": (lambda x: F.relu(x) * F.relu(x).log(), "aten.log", False, "xlogy"),
    "0 / 0": (lambda x: (x * 0) / (x * 0), "aten.div", False, "a division by 0"),
    "reciprocal root of 0": (lambda x: (x * 0).rsqrt() * x, "aten.rsqrt", False, "(x + eps).rsqrt()"),
    "negative to a fraction": (lambda x: x**0.3, "aten.pow", False, "fractional exponent"),
    "acos beyond 1": (lambda x: (x * 9).acos(), "aten.acos", False, "clamp(-1 + eps, 1 - eps)"),
    "masked row": (lambda x: kept_open(x).softmax(-1), "aten._softmax", False, "one element of each row"),
    "std of one": (lambda x: x[:, :1].std(-1, keepdim=True) * x, "aten.std", False, "correction=0"),
    "var of one": (lambda x: x[:, :1].var(-1, keepdim=True) * x, "aten.var", False, "correction=0"),
    "no target": (ignored, "aten.nll_loss_forward", False, "no target counts"),
    "sums of nothing": (
        lambda x: x * kept_open(x).logsumexp(-1, keepdim=True).sub(-INF),
        "aten.sub",
        False,
        "infinities of both signs",
    ),
    "mean of nothing": (lambda x: x * x[:0].mean(), "aten.mean", False, "max(count, 1)"),
    "norm of nothing": (
        lambda x: x / (x * 0).norm(dim=-1, keepdim=True),
        "aten.div",
        False,
        "a division by 0",
    ),
    "exponential": (lambda x: (x.abs() * 1e4).exp() * x, "aten.exp", False, "subtract the maximum"),
    "product": (lambda x: x * 1e30 * (x * 1e30), "aten.mul", False, "scale the input down"),
    "singular": (
        lambda x: x @ torch.linalg.inv_ex((x.T @ x) * 0 + 1)[0],
        "aten.linalg_inv_ex",
        False,
        "torch.eye",
    ),
    "logarithm of a negative determinant": (
        lambda x: x * torch.logdet(torch.tensor([-1.0, 1.0, 1.0, 1.0]).diag() + (x.T @ x) * 0),
        "aten.logdet",
        False,
        "torch.linalg.slogdet",
    ),
    "equal eigenvalues": (
        lambda x: x @ torch.linalg.eigh(torch.eye(4) + (x.T @ x) * 0)[1],
        "aten.div_",
        True,
        "vectors of equal values have no derivative",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", CASES)
def test_the_remedy_is_that_of_the_operation(name: str) -> None:
    act, operation, backward, part = CASES[name]
    diagnosis = diagnosed(Net(act), batch())
    assert diagnosis.cause is not None
    assert (diagnosis.operation, diagnosis.where) == (
        operation,
        "backward" if backward else "forward",
    ), str(diagnosis)
    assert fault(diagnosis) in ("mathematics", "overflow"), str(diagnosis)
    assert part in diagnosis.cause.advice, str(diagnosis)
    assert not any(text in diagnosis.cause.advice for text in GENERAL)


# A number of each format whose square the format does not hold, and the advice on formats that hold it.
LARGE = {torch.float16: 3e2, torch.bfloat16: 2e19, torch.float32: 2e19, torch.float64: 1.5e154}
WIDER = {
    torch.float16: ", or run it in bfloat16 or float32",
    torch.bfloat16: ", or run it in float64",
    torch.float32: ", or run it in float64",
    torch.float64: "",
}


class Scaled(nn.Module):
    """Multiplies the input by a large number, and acts on the product."""

    def __init__(self, act: Callable[[Tensor], Tensor], number: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), number, dtype=dtype))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.weight * x)
        return out.real if out.is_complex() else out


def why(act: Callable[[Tensor], Tensor], number: float, dtype: torch.dtype) -> Cause:
    x = torch.ones(8, 8, dtype=dtype)
    diagnosis = diagnosed(Scaled(act, number, dtype), x)
    assert diagnosis.cause is not None
    return diagnosis.cause


@pytest.mark.parametrize("dtype", WIDER, ids=str)
@pytest.mark.parametrize(
    ("act", "remedy"),
    [
        (Tensor.square, "scale the input down before it"),
        (lambda x: x @ x, "look at the weights and the input (learning rate, initialization)"),
        (
            lambda x: (x * (x / 4)).sum(),
            "the sum, or the squares in it, are too large: scale the input down",
        ),
    ],
    ids=["square", "product", "sum"],
)
def test_an_overflow_is_sent_to_a_format_that_holds_the_result(
    act: Callable[[Tensor], Tensor], remedy: str, dtype: torch.dtype
) -> None:
    cause = why(act, LARGE[dtype], dtype)
    assert (cause.fault, cause.advice) == ("overflow", f"{remedy}{WIDER[dtype]}")


@pytest.mark.parametrize(
    ("power", "number", "dtype", "advice"),
    [
        (20, 1e4, torch.float16, "scale the input down before it, or run it in float64"),
        (99, 1e6, torch.float32, "scale the input down before it"),
    ],
)
def test_an_overflow_beyond_float32_is_sent_to_float64_or_to_no_format(
    power: int, number: float, dtype: torch.dtype, advice: str
) -> None:
    cause = why(lambda x: x.pow(power), number, dtype)
    assert (cause.fault, cause.advice) == ("overflow", advice)


@pytest.mark.parametrize("number", [800.0, 1e22])
def test_an_exponential_of_any_large_number_is_an_overflow(number: float) -> None:
    cause = why(torch.exp, number, torch.bfloat16)
    remedy = "subtract the maximum before the exponential, or `clamp(max=10)` the input"
    assert (cause.fault, cause.advice) == ("overflow", remedy)
    assert cause.evidence[0].endswith(
        "in float64 the result is Inf as well, and finite for smaller numbers"
    )


def test_complex_numbers_are_repeated_in_complex128() -> None:
    cause = why(Tensor.square, 1e21, torch.complex64)
    assert cause.evidence[0].startswith("in complex128 the result is finite, up to 1e+42")
    assert cause.advice.endswith("find out why they grow, or run it in complex128")


def test_no_clamp_is_advised_for_complex_numbers() -> None:
    cause = why(lambda x: (x * 0).log(), 1.0, torch.complex64)
    assert cause.fault == "mathematics"
    assert "clamp" not in cause.advice


def test_integers_that_are_divided_by_0_have_the_remedy_of_a_division() -> None:
    counts = torch.tensor([1, 0])
    cause = why(lambda x: x * (counts / (counts * 0)).sum(), 1.0, torch.float32)
    assert cause.fault == "mathematics"
    assert "a division by 0" in cause.advice


def test_weights_that_adam_broke_in_half_precision_point_at_the_update_before() -> None:
    model = nn.Linear(4, 2).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # eps=1e-8 is 0 in float16
    with stopped(model, optimizer=optimizer) as diagnoses:
        for _ in range(2):
            take_step(optimizer, model(batch().half()).float().square().mean() * 0.0001)
    (diagnosis,) = diagnoses
    assert (diagnosis.step, diagnosis.where, diagnosis.name) == (1, "weight", "weight")
    assert diagnosis.cause is not None
    assert diagnosis.cause.fault == "bad input"
    assert "the update before" in diagnosis.cause.advice


def test_the_largest_leap_of_magnitudes_is_named() -> None:
    diagnosis = diagnosed(Net(lambda x: (x.abs() * 0 + 40).exp() * 1e30 * x.sign()), batch())
    (leap,) = [line for line in str(diagnosis).splitlines() if "leaps" in line]
    assert leap == "  the magnitude leaps most in body: aten.exp: 40 to 2.35e+17"


@pytest.mark.parametrize(
    ("loss", "remedy"),
    [
        (lambda out: out.abs().mean() * 1e38 * 1e3, "scale the input down before it"),
        (lambda out: (out.abs().mean() * 0).reciprocal(), "a division by 0"),
    ],
    ids=["product", "pole"],
)
def test_a_loss_that_is_infinite_has_the_remedy_of_its_fault(
    loss: Callable[[Tensor], Tensor], remedy: str
) -> None:
    diagnosis = diagnosed(Net(), batch(), loss=loss)
    assert (diagnosis.what, diagnosis.where) == ("Inf", "forward")
    assert diagnosis.cause is not None
    assert diagnosis.cause.advice.startswith(remedy)
