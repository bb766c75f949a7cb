"""Small models, each of which has broken some tool that works with gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from small import weights_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 # the name everybody uses

Loss = Callable[[nn.Module, int], Tensor]


def data(step: int, *shape: int) -> Tensor:
    """Return the input of a step: the same in every run, whatever the global random state is."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def mean_square(model: nn.Module, step: int) -> Tensor:
    """Return the loss of most models here."""
    out: Tensor = model(data(step, 5, 4))
    return out.square().mean()


class Mlp(nn.Module):
    """With dropout, which draws random numbers, and BatchNorm, which keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.fc2(self.drop(F.relu(self.norm(self.fc1(x)))))


class Tied(nn.Module):
    """One tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Any:
        index = (x.abs() * 2).long().clamp(max=5)
        return self.head(self.body(self.emb(index)))


class Frozen(nn.Module):
    """The first layer does not train, until somebody thaws it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x).tanh())


class CalledTwice(nn.Module):
    """One module in two places of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.fc(self.fc(x).relu()))


class Residual(nn.Module):
    """`a + b` hands one and the same gradient tensor to both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(5, 4))
        self.kind = nn.Parameter(torch.randn(5, 4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = x + (self.pos + self.kind)
        return h + self.fc(h)


class Summed(nn.Module):
    """The gradient of a sum is one number expanded: all elements share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sum() + self.bias.expand(5, 4).sum() + x.sum() * 0


class Unused(nn.Module):
    """A parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x)


class Sparse(nn.Module):
    """An embedding whose gradient is sparse and not coalesced."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4, sparse=True)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        index = (x.abs() * 2).long().clamp(max=5)
        return self.fc(self.emb(index))


class OddShapes(nn.Module):
    """A 0-dim and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x) * self.scale + self.empty.sum()


class Complex(nn.Module):
    """Complex numbers have no order."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.fc((x.to(torch.complex64) @ self.mix).abs())


class Half(nn.Module):
    """Parameters in float16 and bfloat16, beside one in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(4, 4).to(torch.float16)
        self.brain = nn.Linear(4, 4).to(torch.bfloat16)
        self.wide = nn.Linear(4, 2).to(torch.float64)

    def forward(self, x: Tensor) -> Any:
        h = self.low(x.to(torch.float16)).to(torch.bfloat16)
        return self.wide(self.brain(h).to(torch.float64)).float()


@dataclass(frozen=True)
class Case:
    """A model, and how its step goes."""

    build: Callable[[], nn.Module]
    loss: Loss = mean_square
    complex: bool = False
    sparse: bool = False
    half: bool = False
    twice: bool = False

    def make(self) -> Any:
        """Return the model with the same weights each time."""
        torch.manual_seed(7)
        return self.build()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer with momentum and decay, as far as the gradients allow."""
        params = list(model.parameters())
        if self.sparse:
            return torch.optim.SGD(params, lr=0.05)
        if self.half:
            return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.01)
        return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)

    def backward(self, model: nn.Module, step: int) -> None:
        """Run forward and backward of one step."""
        loss = self.loss(model, step)
        if self.twice:
            # Two losses over one graph.
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
        else:
            loss.backward()


CASES: dict[str, Case] = {
    "mlp": Case(Mlp),
    "tied": Case(Tied),
    "frozen": Case(Frozen),
    "called-twice": Case(CalledTwice),
    "residual": Case(Residual),
    "summed": Case(Summed, lambda model, step: model(data(step, 5, 4))),
    "unused": Case(Unused),
    "sparse": Case(Sparse, sparse=True),
    "odd-shapes": Case(OddShapes),
    "complex": Case(Complex, complex=True),
    "half": Case(Half, half=True),
    "retain-graph": Case(Mlp, twice=True),
}


def train(case: Case, model: nn.Module, steps: int = 6) -> list[Tensor]:
    """Train with validation in between; return copies of parameters and buffers at the end."""
    torch.manual_seed(11)
    optimizer = case.optimizer(model)
    for step in range(steps):
        if step == 3:
            model.requires_grad_(True)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        case.backward(model, step)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            case.loss(model, 100 + step)
        with torch.inference_mode():
            case.loss(model, 100 + step)
        model.train()
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every number that an update could move."""
    found = weights_of(model)
    for state in optimizer.state.values():
        found += [value.clone() for value in state.values() if isinstance(value, Tensor)]
    return found


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Tell whether two runs agree in every bit, NaN included."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=7e7), b.nan_to_num(nan=7e7))
        for a, b in zip(left, right, strict=True)
    )
