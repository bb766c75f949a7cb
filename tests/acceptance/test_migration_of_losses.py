"""What people write today to combine the gradients of losses, and the rules in its place, from the table of the guide."""

from __future__ import annotations

import pytest
import torch
from migration import Net, agree, row
from models import data
from small import sgd, weights_of
from torch import Tensor, nn

import gradsurgeon

pytestmark = pytest.mark.slow

UPDATES = 4


class TwoHeads(Net):
    """The network of the table with a second head, and what the first layer makes of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 1)

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = torch.tanh(self.body(x))
        seg = (self.head(features) - 1).square().mean()
        return features, seg, 3 * (self.other(features) + self.head(features)).square().mean()


def train(code: str = "", rules: str = "") -> list[Tensor]:
    """Return the weights after some updates, of a script with a line of the table or with its rules."""
    model = TwoHeads()
    optimizer = sgd(model)
    session = gradsurgeon.apply(model, rules, optimizer=optimizer) if rules else None
    for step in range(UPDATES):
        optimizer.zero_grad()
        features, seg, depth = model.losses(data(step, 5, 4))
        if rules:
            gradsurgeon.backward({"seg": seg, "depth": depth})
        elif "torchjd" in code:
            torchjd = pytest.importorskip("torchjd")
            pytest.importorskip("torchjd.autojac")
            known = {"torchjd": torchjd, "model": model, "features": features}
            exec(code, {**known, "seg": seg, "depth": depth})
        elif code:
            by_hand(code, model, seg, depth)
        else:
            (seg + depth).backward()
        optimizer.step()
    if session is not None:
        assert any(value != 1.0 for _, value in session.history("seg", "weight"))
        session.remove()
    return weights_of(model)


def by_hand(code: str, model: TwoHeads, seg: Tensor, depth: Tensor) -> None:
    shared = list(model.body.parameters())
    flat = [
        torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, shared, retain_graph=True)])
        for loss in (seg, depth)
    ]
    scope = dict(zip(("seg", "depth"), flat, strict=True))
    exec(code, scope)
    (seg + depth).backward()
    sizes = [param.numel() for param in shared]
    for param, part in zip(shared, scope["g"].split(sizes), strict=True):
        param.grad = part.view_as(param)


@pytest.mark.parametrize("piece", ["torchjd.autojac", "seg @ depth"])
def test_the_same_weights_come_out(piece: str) -> None:
    one = row(piece)
    wanted = train(one.code)
    assert agree(one.same, train(rules=one.rules), wanted)
    assert not agree("rounding", train(), wanted)
