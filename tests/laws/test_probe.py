"""A probe asks one batch: do samples mix, does evaluation repeat itself, which inputs count, is the first loss a guess."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 # as everybody calls it
from small import attach
from torch import Tensor, nn

from gradsurgeon.forensics.probe import answers
from gradsurgeon.runtime.session import attachment_of

X = torch.linspace(-1, 1, 48).sin().view(6, 8)
IDS = torch.tensor([0, 1, 2, 0, 1, 2])
SEQUENCES = torch.linspace(0, 40, 120).sin().view(5, 3, 8)
EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
APART = "samples: the {} of the batch do not mix"
MIX = "found: samples: the {} of the batch mix: with half of them replaced, the outputs of others change, first in {}. "
NO_BATCH = "samples: not asked, because no dimension is certain to have different samples"
DIFFER = "evaluation: two calls in evaluation mode differ, first in {}, "
COUNTS = "inputs: {} changes the outputs when samples exchange it"
IDLE = "found: inputs: {} changes no output when samples exchange it. "


class Net(nn.Module):
    """A model whose forward pass is one function, with some layers."""

    def __init__(self, run: Callable[..., Any], layers: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.run = run
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, side: Tensor | None = None) -> Any:
        if side is None:
            return self.run(x, *self.layers)
        return self.run(x, side, *self.layers)


def asked(
    model: nn.Module, *inputs: Tensor, loss: Callable[[Any], Tensor] | None = None
) -> list[str]:
    """Return the answers on one call, after which all is as it was."""
    session = attach(model, {"action": "nan-trap", "params": "*"})
    output = model(*inputs)
    if loss is None:
        output.sum().backward()
    else:
        loss(output).backward()
    session.pause()
    step = attachment_of(session).controller.kept.step
    before = _state(model)
    texts = list(answers(step.calls[0], model, step.losses.get(1)))
    for left, right in zip(before, _state(model), strict=True):
        assert left == right
    return texts


def _state(model: nn.Module) -> list[Any]:
    tensors = [*model.state_dict().values(), *[param.grad for param in model.parameters()]]
    values = [tensor.tolist() for tensor in tensors if tensor is not None]
    modes = [module.training for module in model.modules()]
    return [values, modes, torch.get_rng_state().tolist(), random.getstate()]


def _zeros(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    return layer


def _linear(width: int = 8) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, 4)


# Function, layers, inputs, and how one answer begins.
CASES: dict[str, tuple[Callable[..., Any], list[nn.Module], list[Tensor], str]] = {
    "plain": (lambda x, a: a(x), [_linear()], [X], APART.format(6)),
    "softmax over samples": (
        lambda x, a: a(x.softmax(0)),
        [_linear()],
        [X],
        MIX.format(6, "layers.0"),
    ),
    "batch norm": (
        lambda x, a, n: n(a(x)),
        [_linear(), nn.BatchNorm1d(4)],
        [X],
        "samples: the 6 of the batch mix in layers.1, as batch norm does, and nowhere else",
    ),
    "more than batch norm": (
        lambda x, a, n: n(a(x - x.mean(0))),
        [_linear(), nn.BatchNorm1d(4)],
        [X],
        MIX.format(6, "layers.0"),
    ),
    "mean after batch norm": (
        lambda x, a, n, b: b(n(a(x)) - n(a(x)).mean(0)),
        [_linear(), nn.BatchNorm1d(4), _linear(4)],
        [X],
        MIX.format(6, "layers.2"),
    ),
    "time first": (
        lambda x, r: r(x)[0],
        [nn.LSTM(8, 4)],
        [SEQUENCES],
        "samples: the 3 along dimension 1 do not mix, what lies along dimension 0 does: right if samples lie along dimension 1, ",
    ),
    "last step, time first": (
        lambda x, r: r(x)[0][-1],
        [nn.LSTM(8, 4)],
        [SEQUENCES],
        APART.format(3),
    ),
    "last step, no batch_first": (
        lambda x, r: r(x)[0][:, -1],
        [nn.LSTM(8, 4)],
        [SEQUENCES],
        MIX.format(5, "layers.0"),
    ),
    "last step, batch_first": (
        lambda x, r: r(x)[0][:, -1],
        [nn.LSTM(8, 4, batch_first=True)],
        [SEQUENCES],
        APART.format(5),
    ),
    "similarities": (lambda x, a: a(x) @ a(x).T, [_linear()], [X], APART.format(6)),
    "a graph": (
        lambda x, e, a: a(x.index_add(0, e[1], x[e[0]])),
        [_linear()],
        [X, EDGES],
        NO_BATCH,
    ),
    "an adjacency": (lambda x, e, a: e @ a(x), [_linear()], [X, torch.ones(6, 6)], NO_BATCH),
    "one sample": (lambda x, a: a(x), [_linear()], [X[:1]], NO_BATCH),
    "functional dropout": (
        lambda x, a: F.dropout(a(x), 0.5),
        [_linear()],
        [X],
        "found: " + DIFFER.format("Net") + "because a dropout is on. ",
    ),
    "dropout": (
        lambda x, a, d: d(a(x)),
        [_linear(), nn.Dropout()],
        [X],
        "evaluation: two calls in evaluation mode are equal",
    ),
    "sampling": (
        lambda x, a, b: b(a(x) + torch.randn_like(a(x))),
        [_linear(), _linear(4)],
        [X],
        DIFFER.format("layers.1") + "and no dropout is on: ",
    ),
    "both count": (
        lambda x, i, a, e: a(x) + e(i),
        [_linear(), nn.Embedding(3, 4)],
        [X, IDS],
        COUNTS.format("side"),
    ),
    "times 0": (
        lambda x, i, a, e: a(x) + 0 * e(i),
        [_linear(), nn.Embedding(3, 4)],
        [X, IDS],
        IDLE.format("side"),
    ),
    "begins at 0": (
        lambda x, a, z: z(a(x)),
        [_linear(), _zeros(_linear(4))],
        [X],
        COUNTS.format("x"),
    ),
    "by chance": (
        lambda x, i, a, e: a(x) + e(i) * (torch.rand(6, 1) < 0.5),
        [_linear(), nn.Embedding(3, 4)],
        [X, IDS],
        COUNTS.format("side"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_batch_answers(case: str) -> None:
    run, layers, inputs, begin = CASES[case]
    texts = asked(Net(run, tuple(layers)), *inputs)
    begins = [text[: len(begin)] for text in texts]
    assert begin in begins
    others = [text for text, short in zip(texts, begins, strict=True) if short != begin]
    assert [text for text in others if text.startswith("found")] == []


def test_inputs_that_are_alike_are_not_judged() -> None:
    texts = asked(Net(lambda x, m, a: a(x) * m.any(), (_linear(),)), X, torch.ones(6, 1))
    assert [text for text in texts if text.startswith(("inputs", "found"))] == [COUNTS.format("x")]


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (1.0, "first loss: 1.37, and the log of the 4 classes is 1.39"),
        (
            100.0,
            "found: first loss: 30.3, and the log of the 4 classes is 1.39: the model is sure of wrong classes. ",
        ),
    ],
)
def test_a_first_loss_is_that_of_a_guess(scale: float, text: str) -> None:
    labels = torch.tensor([0, 1, 2, 3, -100, 0])
    model = Net(lambda x, a: a(x) * scale, (_linear(),))
    last = asked(model, X, loss=lambda output: F.cross_entropy(output, labels) * 7)[-1]
    assert last[: len(text)] == text


def test_a_call_that_does_not_repeat_itself_is_not_judged() -> None:
    calls: list[int] = []

    def run(x: Tensor, a: nn.Module) -> Tensor:
        calls.append(1)
        return torch.as_tensor(a(x) * len(calls))

    place = "samples, inputs: not asked, because a second call with the same input and random state differs, first in Net"
    assert asked(Net(run, (_linear(),)), X)[0] == place
