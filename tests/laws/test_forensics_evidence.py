"""What the trap takes for evidence: masks are meant, numbers are those of the moment, the format can lose a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from laws.test_forensics import Net, batch, brief, diagnosed, fault
from small import rule_file
from torch import Tensor, nn

INF = float("inf")
NEVER = torch.tensor(-INF)
ATTENTION = rule_file({"id": "trap", "action": "nan-trap", "params": "q.*"})


class Attention(nn.Module):
    """Attention whose mask comes from somewhere, and leaves one row without a key."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.q, self.kind = nn.Linear(8, 8), kind
        whole = torch.full((5, 5), -INF).triu(0)
        self.mask: Tensor
        if kind == "parameter":
            self.mask = nn.Parameter(whole, requires_grad=False)
        elif kind == "buffer":
            self.register_buffer("mask", whole)
        else:
            self.mask = whole

    def forward(self, x: Tensor) -> Any:
        q = self.q(x)
        scores, there = q @ q.t(), torch.ones(5, 5, dtype=torch.bool).tril(-1)
        masked: dict[str, Callable[[], Tensor]] = {
            "literal": lambda: torch.where(there, scores, torch.tensor(-INF)),
            "global": lambda: torch.where(there, scores, NEVER),
            "numpy": lambda: scores + torch.from_numpy(np.triu(np.full((5, 5), -np.inf, "f4"))),
        }
        scores = masked.get(self.kind, lambda: scores + self.mask)()
        return torch.softmax(scores, -1) @ q


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute", "literal", "global", "numpy"])
def test_the_operation_that_made_nan_of_a_mask_is_named(kind: str) -> None:
    diagnosis = diagnosed(Attention(kind), torch.randn(5, 8), rules=ATTENTION)
    assert brief(diagnosis)[1:] == ("NaN", "forward", ".", "aten._softmax", "mathematics")


class LogMask(nn.Module):
    """A mask that is the logarithm of 0 and 1, and scores that overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(5, 5, dtype=x.dtype).tril().log()
        q = self.q(x) * 300
        out: Tensor = torch.softmax(q @ q.t() + mask, -1) @ q
        return out.float()


def test_scores_that_overflow_are_named_and_not_the_mask() -> None:
    diagnosis = diagnosed(LogMask().half(), torch.randn(5, 8).half(), rules=ATTENTION)
    assert brief(diagnosis)[1:] == ("Inf", "forward", ".", "aten.mm", "overflow")


def softmax(x: Tensor) -> Tensor:
    scores = (x @ x.t()).masked_fill(torch.arange(len(x))[:, None] == 2, -INF)
    out = torch.softmax(scores, -1)
    scores.zero_()  # reuses the memory
    return out @ x


def exp(x: Tensor) -> Tensor:
    large = x * 500
    out = torch.exp(large)
    large.clamp_(max=1)
    return out * large


def root(x: Tensor) -> Tensor:
    x = x * 1
    out = x.sqrt()
    return torch.relu_(x) + out


@pytest.mark.parametrize(
    ("act", "operation", "cause"),
    [
        (softmax, "aten._softmax", "mathematics"),
        (exp, "aten.exp", "overflow"),
        (root, "aten.sqrt", "mathematics"),
    ],
)
def test_an_operation_is_judged_on_the_numbers_it_had(
    act: Callable[[Tensor], Tensor], operation: str, cause: str
) -> None:
    diagnosis = diagnosed(Net(act), batch())
    assert (diagnosis.operation, fault(diagnosis)) == (operation, cause)


def test_numbers_that_grew_are_an_overflow_and_no_fault_of_the_kernel() -> None:
    model = Net(lambda x: nn.functional.layer_norm(x * 1e30, (4,)) * x)
    assert fault(diagnosed(model, batch())) == "overflow"


class Normed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * (torch.arange(len(x)) != 2)[:, None]  # one row of zeros
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12)


def test_a_constant_that_the_format_rounds_to_zero_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Normed(), nn.Linear(4, 2)).half()
    diagnosis = diagnosed(model, batch().half(), loss=lambda out: out.float().square().mean())
    assert diagnosis.cause is not None
    assert diagnosis.cause.fault == "underflow"
    assert any("1e-12" in text and "float16" in text for text in diagnosis.cause.evidence)
    # It advises a wider format, and the replay shows that it helps.
    (tried,) = diagnosis.tried
    assert tried.remedy == "in float32 from there on"
    assert tried.outputs_finite


def test_where_two_infinities_meet_both_are_named() -> None:
    def both(x: Tensor) -> Tensor:
        return (x.abs() * 1e4).exp() + (x * 0).log()

    diagnosis = diagnosed(Net(both), batch())
    assert (diagnosis.certainty, diagnosis.operation) == ("partial", "aten.exp")
    (reason,) = diagnosis.reasons
    assert reason.startswith("aten.log at ")
    assert reason.endswith("made an infinity at the same elements, and may be the cause instead")


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4)],
    ids=lambda norm: type(norm).__name__,
)
def test_a_magnitude_is_that_of_a_result_not_of_statistics_for_backward(norm: nn.Module) -> None:
    model = Net(lambda x: norm(x * 1e-3).log())
    magnitudes = dict(diagnosed(model, batch()).history)
    (found,) = [value for label, value in magnitudes.items() if "norm" in label]
    with torch.no_grad():
        expected = norm(model.first(batch()) * 1e-3).abs().max()
    assert found == pytest.approx(float(expected), rel=1e-3)
