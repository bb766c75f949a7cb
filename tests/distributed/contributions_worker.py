"""Rules on what one rank contributes, beside hooks written by hand, under DDP and FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from distributed.batches import make, mine, whole, wrapped
from ranks import Json
from small import rules_of_workers, sgd, take_step
from torch import Tensor, nn
from worker import work

import gradsurgeon

LIMIT = 0.03
RULES: dict[str, list[Json]] = rules_of_workers("contributions")


def by_hand(model: nn.Sequential, what: str, norms: list[float]) -> None:
    """Do with hooks what the rules do."""

    def edit(tensor: Tensor, *, record: bool = True) -> Tensor:
        out = tensor.clamp(max=LIMIT)
        if record:
            norms.append(float(torch.linalg.vector_norm(out.detach())))
        return out

    layer: Any = model[0]
    if what == "backward":
        layer.weight.register_hook(edit)
        layer.bias.register_hook(lambda grad: edit(grad, record=False))
    elif what == "output":
        model[0].register_forward_hook(lambda _m, _a, out: edit(out))
    else:
        model[0].register_forward_hook(lambda _m, _a, out: out.register_hook(edit) and None)


def train(kind: str, what: str, *, hand: str) -> Json:
    """Return final weights and this rank's records."""
    model = make()
    norms: list[float] = []
    called = wrapped(kind, model)
    if hand == "hooks":
        by_hand(model, what, norms)
    rules = {"version": 1, "rules": RULES[what]}
    session = gradsurgeon.apply(called, rules) if hand == "rules" else None
    optimizer = sgd(model, 0.5)
    for step in range(3):
        take_step(optimizer, called(mine(step)).square().mean())
    if session is not None:
        name = "0.weight" if what == "backward" else "0"
        norms = [value for _, value in session.history(name, rule="n")]
        session.remove()
    return {"weights": [whole(param) for param in model.parameters()], "norms": norms}


def main() -> Json:
    """Run every part."""
    return {
        f"{kind} {what} {hand}": train(kind, what, hand=hand)
        for kind in ("DDP", "FSDP2")
        for what in RULES
        if (kind, what) != ("FSDP2", "backward")
        for hand in ("hooks", "rules", "neither")
    }


if __name__ == "__main__":
    work(main)
