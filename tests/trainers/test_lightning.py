"""Lightning, automatic and manual: backward and clipping happen inside the step of the optimizer.

In automatic optimization the trainer hands the optimizer a closure that clears gradients, runs the
passes and clips; torch calls step hooks before it. The rules have to act after it.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import data
from pairs import slow
from small import attach, linears, sgd, steps_of
from torch import Tensor
from torch.amp import GradScaler
from torch.utils.data import DataLoader
from trainers import by_hand
from trainers.by_hand import CLIP, PARTS, RULES, STEPS, Hand
from trainers.own_warnings import OWN_WARNINGS

import gradsurgeon
from gradsurgeon import runtime

pytestmark = OWN_WARNINGS

TABLE = by_hand.table("net.2.*")
LOGGED = "net.0.weight"
MANUAL = pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])


def batches() -> Any:
    return data(5, STEPS * PARTS, 3, 4)


def net(**options: Any) -> Any:
    return importlib.import_module("trainers.lightning_models").Net(loss, **options)


def loss(x: Tensor, model: Any) -> Tensor:
    found: Tensor = (model.net(x) - 1.0).square().mean() * 3
    return found


def fit(model: Any, path: Path, **options: Any) -> None:
    import lightning

    automatic = {"accumulate_grad_batches": PARTS, "gradient_clip_val": CLIP}
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(path),
        **(automatic if model.automatic_optimization else {}),
        **options,
    )
    trainer.fit(model, DataLoader(batches(), batch_size=None))


def hand_written(hand: Hand, **options: Any) -> by_hand.End:
    model = net()
    optimizer = model.configure_optimizers()
    steps = [[partial(_part, x) for x in step] for step in batches().split(PARTS)]
    return by_hand.train(model, optimizer, steps, hand, **options)


def _part(x: Tensor, model: Any) -> Tensor:
    return loss(x, model) / PARTS


COMPARED = by_hand.Compared(TABLE, LOGGED, "net.2", hand_written)


@pytest.mark.cell("Lightning, automatic optimization", "backward", "accumulated", "step", "modules")
@pytest.mark.cell("Lightning, manual optimization", "backward", "accumulated", "step", "modules")
@MANUAL
@pytest.mark.parametrize("name", [*RULES[::3], *slow(*RULES[1::3], *RULES[2::3])])
def test_a_rule_ends_with_the_weights_of_the_loop_by_hand(
    name: str, manual: bool, tmp_path: Path
) -> None:
    model = net(manual=manual)

    def trained() -> None:
        fit(model, tmp_path)
        # Lightning's own optimizer object shares the hooks of the one it wraps: they are one.
        attachment: Any = runtime.find(model)
        (owner,) = attachment.controller.steps._owners
        assert type(owner) is torch.optim.SGD

    COMPARED.check_rule(name, model, trained)


@pytest.mark.slow
@MANUAL
@pytest.mark.parametrize("micro", [0, 1], ids=["first micro-batch", "second micro-batch"])
@pytest.mark.parametrize("then", ["skip-step", "raise"])
def test_a_nan_is_stopped_and_named_before_clipping_smears_it(
    then: str, micro: int, manual: bool, tmp_path: Path
) -> None:
    model = net(manual=manual)
    first = COMPARED.check_nan(then, micro, model, partial(fit, model, tmp_path))
    assert first == "net.2.bias"


class Recording(torch.optim.Optimizer):
    """Gradient descent that is no optimizer of torch's, and keeps what it consumed."""

    def __init__(self, params: Any, lr: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr})
        self.consumed: list[float] = []

    def step(self, closure: Any = None) -> Any:
        result = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad * group["lr"])
        self.consumed.append(self.param_groups[0]["params"][0].grad.norm().item())
        return result


@pytest.mark.slow
@MANUAL
def test_an_optimizer_of_the_scripts_own_consumes_what_the_rules_left(
    manual: bool, tmp_path: Path
) -> None:
    made: list[Recording] = []

    def make(params: Any, **options: Any) -> Recording:
        made.append(Recording(params, **options))
        return made[-1]

    clip = {
        "id": "clip",
        "action": "clip-norm",
        "per": "parameter",
        "max_norm": 0.03,
        "params": LOGGED,
    }
    after = {"id": "after", "action": "norm-log", "at": "step", "params": LOGGED}
    model = net(manual=manual, kind=make)
    with attach(model, clip, after) as session:
        fit(model, tmp_path)
    assert session.events == []
    assert made[0].consumed == pytest.approx([0.03] * STEPS, rel=1e-4)
    assert [norm for _, norm in session.history(LOGGED)] == pytest.approx(made[0].consumed)


@pytest.mark.slow
@MANUAL
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16(precision: str, manual: bool, tmp_path: Path) -> None:
    model = net(manual=manual)
    with gradsurgeon.apply(model, TABLE["clamp, step"].rules()) as session:
        fit(model, tmp_path, precision=precision)
        assert session.step == STEPS
    assert session.events == []
    assert session.status()["it"].fired == STEPS * 2
    wanted = hand_written(TABLE["clamp, step"])
    ends = {name: weight.float() for name, weight in by_hand.weights(model).items()}
    # Eight bits of mantissa, and bounds that most gradients exceed.
    assert by_hand.distance(ends, wanted.weights) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_a_scaler(name: str, tmp_path: Path) -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    model = net()

    class Unrounded(MixedPrecision):
        """The scaler alone: float16 would hide a small mistake."""

        def autocast_context_manager(self) -> Any:
            return torch.autocast("cpu", enabled=False)

    plugin = Unrounded("16-mixed", "cpu", GradScaler("cpu", init_scale=256.0))
    COMPARED.check_rule(name, model, partial(fit, model, tmp_path, plugins=[plugin]))


@pytest.mark.slow
def test_two_optimizers_have_two_clocks(tmp_path: Path) -> None:
    norms = {"id": "norms", "action": "norm-log", "at": "step", "params": "*"}
    model = importlib.import_module("trainers.lightning_models").Gan()
    with attach(model, norms) as session:
        fit(model, tmp_path)
        assert session.step == STEPS * PARTS
    assert steps_of(session, "d.weight") == list(range(8))
    assert steps_of(session, "g.weight") == list(range(4))
    assert session.events == []


@pytest.mark.slow
def test_what_fabric_wraps_keeps_its_names() -> None:
    import lightning

    model = linears(3, 2, 1)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    wrapped = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(sgd(wrapped))
    rules = [{"id": "half", "action": "scale", "params": "0.*", "factor": 0.5, "at": "step"}]
    session = gradsurgeon.apply(wrapped, {"version": 1, "rules": rules})
    assert session.plan.manifest.origin == "Sequential"
    assert [param.names for param in session.plan.manifest.params] == [
        ("0.weight",),
        ("0.bias",),
        ("1.weight",),
        ("1.bias",),
    ]
    # What arrives at the first bias is the weight behind it.
    expected = model.get_parameter("1.weight").detach()[0] / 2
    optimizer.zero_grad()
    fabric.backward(wrapped(torch.ones(1, 3)).sum())
    optimizer.step()
    torch.testing.assert_close(model.get_parameter("0.bias").grad, expected)
    assert session.status()["half"].fired == 2
