"""accelerate's `Accelerator`: its wrapped optimizer is one optimizer, and every rule acts once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from models import data
from pairs import singly
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader
from trainers import by_hand
from trainers.by_hand import CLIP, PARTS, RULES, STEPS, Hand

import gradsurgeon

# They set variables of the environment, and keep a state for the process.
pytestmark = pytest.mark.usefixtures("own_environment")

TABLE = by_hand.table("2.*")
LOGGED = "0.weight"


def make() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2, bias=False)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)


def batches() -> Any:
    return data(5, STEPS * PARTS, 3, 4)


def loss(x: Tensor, model: nn.Module) -> Tensor:
    found: Tensor = (model(x) - 1.0).square().mean() * 3
    return found


def hand_written(hand: Hand, **options: Any) -> by_hand.End:
    model, optimizer = make()
    # accelerate divides each loss by the number of micro-batches.
    steps = [[partial(_part, x) for x in step] for step in batches().split(PARTS)]
    return by_hand.train(model, optimizer, steps, hand, **options)


def _part(x: Tensor, model: nn.Module) -> Tensor:
    return loss(x, model) / PARTS


COMPARED = by_hand.Compared(TABLE, LOGGED, "2", hand_written)


def accelerated(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    precision: str = "no",
    scaler: GradScaler | None = None,
) -> None:
    # Late: of many workers that import this file one runs its tests.
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=PARTS, mixed_precision=precision
    )
    accelerator.scaler = scaler
    loader: Any = DataLoader(batches(), batch_size=None)
    wrapped, stepping, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(loss(x, wrapped))
            if accelerator.sync_gradients:
                if scaler is not None:
                    # accelerate has a scaler, and does this by itself, for fp16 on a GPU only.
                    scaler.unscale_(optimizer)
                accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
            stepping.step()
            stepping.zero_grad()


@pytest.mark.cell("`accelerate`", "backward", "accumulated", "step", "modules")
@singly(scaled=[False, True], name=RULES)
def test_a_rule_ends_with_the_weights_of_the_loop_by_hand(name: str, scaled: bool) -> None:
    model, optimizer = make()
    scaler = GradScaler("cpu", init_scale=256.0) if scaled else None
    COMPARED.check_rule(name, model, partial(accelerated, model, optimizer, scaler=scaler))


@singly(micro=[0, 1], then=["skip-step", "raise"])
def test_a_nan_is_stopped_and_named_before_clipping_smears_it(then: str, micro: int) -> None:
    model, optimizer = make()
    fit = partial(accelerated, model, optimizer)
    assert COMPARED.check_nan(then, micro, model, fit) == "2.bias"


def test_a_wrapped_optimizer_that_is_named_is_the_one_inside() -> None:
    from accelerate import Accelerator

    model, optimizer = make()
    accelerator = Accelerator(cpu=True)
    model, wrapped = accelerator.prepare(model, optimizer)
    half = {"id": "half", "action": "scale", "factor": 0.5, "at": "step", "params": "*"}
    with gradsurgeon.apply(model, {"version": 1, "rules": [half]}, optimizer=wrapped) as session:
        for _ in range(2):
            model(data(0, 3, 4)).sum().backward()
            wrapped.step()
            wrapped.zero_grad()
        assert session.step == 2
        assert session.status()["half"].fired == 2 * 5
    assert session.events == []
    assert not optimizer._optimizer_step_pre_hooks


def test_bf16() -> None:
    model, optimizer = make()
    with gradsurgeon.apply(model, TABLE["clamp, step"].rules()) as session:
        accelerated(model, optimizer, precision="bf16")
        assert session.step == STEPS
    assert session.events == []
    assert session.status()["it"].fired == STEPS * 2
    wanted = hand_written(TABLE["clamp, step"])
    # Eight bits of mantissa, and bounds that most gradients exceed.
    assert by_hand.distance(by_hand.weights(model), wanted.weights) < 0.05
