"""The tools that people use today, and the rule that the guide names for each: both run as the guide has them."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from migration import Net, agree, row
from models import data
from ranks import Json
from running_bounds import ByHand
from small import sgd, take_step, weights_of
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import NonFiniteGradientError

pytestmark = pytest.mark.slow

LIGHTNING_WARNINGS = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning", "ignore:.*does not have many workers"
)
ANOMALY = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")


def test_wandb_watches_the_same_numbers(tmp_path: Path) -> None:
    wandb: Any = pytest.importorskip("wandb")
    one, model, watched = row("wandb.watch"), Net(), {}
    settings = wandb.Settings(silent=True, console="off")
    run = wandb.init(mode="offline", dir=tmp_path, project="x", settings=settings)
    exec(one.code, {"wandb": wandb, "model": model})
    optimizer = sgd(model, 0.0)
    names = dict(model.named_parameters())
    with gradsurgeon.apply(model, one.rules) as session:
        for step in range(10):
            model.fault = float("inf") if step == 9 else None
            take_step(optimizer, model(data(step, 5, 4)).square().mean())
            run.log({"step": step})
            if step in (3, 4, 9):
                watched[step] = {name: _histogram(run, name) for name in names}
        run.unwatch(model)
        run.finish()
        found = {
            (name, stat): dict(session.history(name, stat=stat))
            for name in names
            for stat in ("min", "max", "nonfinite")
        }
    assert set(watched[3].values()) == {None}
    assert {tuple(log) for log in found.values()} == {(4, 9)}
    for name, param in names.items():
        counts, edges = watched[4][name] or ([], [])
        assert (edges[0], edges[-1]) == (found[name, "min"][4], found[name, "max"][4])
        assert found[name, "min"][4] < found[name, "max"][4]
        assert sum(counts) == param.numel()
        assert found[name, "nonfinite"][4] == 0
        counts, _ = watched[9][name] or ([], [])
        assert sum(counts) == param.numel() - found[name, "nonfinite"][9]
    assert found["body.weight", "nonfinite"][9] == 4


def _histogram(run: Any, name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return counts and edges that wandb has kept of a parameter last."""
    found = run.summary.get(f"gradients/{name}")
    return None if found is None else (tuple(found["values"]), tuple(found["bins"]))


class Cliff(nn.Module):
    """Has a finite output, and a gradient that is NaN or infinite where the input is 0."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


def stopped(act: Callable[[Tensor], Tensor], *, code: str = "", rules: str = "") -> tuple[int, Any]:
    """Return the step at which training stops, which goes wrong in the third, and the error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Cliff(torch.tanh), nn.Linear(8, 1))
    optimizer = sgd(model)
    attached: Any = gradsurgeon.apply(model, rules) if rules else contextlib.nullcontext()
    with torch.autograd.set_detect_anomaly(False), attached:  # which ends what the code begins
        exec(code, {"torch": torch, "model": model, **_debugger()})
        for step in range(5):
            model[1].act = act if step == 2 else torch.tanh  # type: ignore[assignment]
            optimizer.zero_grad()
            try:
                model(data(step, 6, 4)).square().mean().backward()
                optimizer.step()
            except (RuntimeError, ValueError, NonFiniteGradientError) as error:
                return step, error
    return -1, None


def _debugger() -> Json:
    from transformers.debug_utils import DebugUnderflowOverflow

    return {"DebugUnderflowOverflow": DebugUnderflowOverflow}


# Each makes NaN in its own node of the backward pass, of a finite output.
BORN = {
    "SqrtBackward0": lambda x: (x - x).sqrt() * 0,
    "PowBackward0": lambda x: (x - x).pow(0.5) * 0,
    "DivBackward0": lambda x: torch.where(x > 9, x / (x - x), torch.ones_like(x)),
}


@ANOMALY
@pytest.mark.parametrize("node", BORN)
def test_anomaly_detection_stops_at_the_same_node(node: str) -> None:
    one, act = row("detect_anomaly"), BORN[node]
    step, error = stopped(act, code=one.code)
    assert (step, str(error)) == (2, f"Function '{node}' returned nan values in its 0th output.")
    step, error = stopped(act, rules=one.rules)
    assert (step, error.step, error.diagnosis.node) == (2, 2, node)


@ANOMALY
def test_anomaly_detection_does_not_name_what_goes_wrong_in_the_forward_pass() -> None:
    one = row("detect_anomaly")
    step, error = stopped(torch.sqrt, code=one.code)
    assert (step, "returned nan" in str(error), "Sqrt" in str(error)) == (2, True, False)
    step, error = stopped(torch.sqrt, rules=one.rules)
    assert (step, error.diagnosis.where, error.diagnosis.operation) == (2, "forward", "aten.sqrt")


@ANOMALY
def test_anomaly_detection_lets_infinities_pass() -> None:
    one, model = row("detect_anomaly"), nn.Linear(1, 1, bias=False)
    optimizer = sgd(model)
    nn.init.zeros_(model.weight)
    with torch.autograd.set_detect_anomaly(False):
        exec(one.code, {"torch": torch})
        model(torch.ones(1, 1)).sqrt().sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.isinf().all()
    optimizer.zero_grad()
    with gradsurgeon.apply(model, one.rules):
        model(torch.ones(1, 1)).sqrt().sum().backward()
        with pytest.raises(NonFiniteGradientError):
            optimizer.step()


@pytest.mark.parametrize("bad", [torch.sqrt, lambda x: x * 3e38 * 9])
def test_the_debugger_of_transformers_stops_at_the_same_module(
    bad: Callable[[Tensor], Tensor],
) -> None:
    one, said = row("DebugUnderflow"), io.StringIO()
    with contextlib.redirect_stdout(said):
        step, error = stopped(bad, code=one.code)
    assert (step, type(error)) == (2, ValueError)
    frames = re.findall(r"^ {17} (\S+) (\w+)$", said.getvalue(), re.MULTILINE)
    step, error = stopped(bad, rules=one.rules)
    assert (step, error.step) == (2, 2)
    assert (error.name, error.diagnosis.module_type) == frames[-1] == ("1", "Cliff")


def test_the_rule_stops_before_the_update_and_not_in_the_forward_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 8), Cliff(torch.sqrt))
    optimizer = sgd(model)
    with gradsurgeon.apply(model, row("DebugUnderflow").rules):
        loss = model(data(0, 6, 4)).sum()
        loss.backward()
        with pytest.raises(NonFiniteGradientError):
            optimizer.step()


# Layer 200 is what an expression without an end takes for one of 20 to 29.
LAYERS = ("0", "1", "2", "3", "12", "19", "20", "21", "29", "30", "200")


def test_the_same_parameters_are_frozen_as_by_axolotl() -> None:
    one = row("unfrozen")
    model = nn.Module()
    model.model, model.lm_head = nn.Module(), nn.Linear(4, 2)
    model.model.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in LAYERS})
    names = [name for name, _ in model.named_parameters()]
    with gradsurgeon.apply(model, one.rules, optimizer=[]) as session:
        frozen = {name for name in names if "frozen" in session.plan.chains.get(name, ())}
    # As it is documented: a dot is a dot, and an expression matches from the beginning of the name.
    patterns = [re.compile(text.replace(".", r"\.")) for text in re.findall('"([^"]+)"', one.code)]
    theirs = {name for name in names if not any(pattern.match(name) for pattern in patterns)}
    assert theirs ^ frozen == {"model.layers.200.weight", "model.layers.200.bias"}
    assert {"model.layers.2.weight", "model.layers.30.weight", "lm_head.bias"} <= frozen
    assert not {"model.layers.20.weight", "model.layers.29.bias", "lm_head.weight"} & frozen


def clipped(clip: Callable[[nn.Module], object], rules: str | None = None) -> list[Tensor]:
    """Train with a batch in ten that makes a spike; return the weights."""
    model = Net()
    optimizer = sgd(model, 0.01)
    attached: Any = gradsurgeon.apply(model, rules) if rules else contextlib.nullcontext()
    with attached:
        for step in range(140):
            optimizer.zero_grad()
            loss = (model(data(step, 5, 4)) - 1).square().mean()
            (loss * (30 if step % 10 == 9 else 1)).backward()
            clip(model)
            optimizer.step()
    return weights_of(model)


def test_the_class_of_zclip_ends_with_the_same_weights() -> None:
    theirs, one = pytest.importorskip("zclip"), row("ZClip(")
    wanted = clipped(eval(one.code, {"ZClip": theirs.ZClip}).step)
    found = clipped(lambda _: None, one.rules)
    assert agree(one.same, found, wanted)
    assert not agree("rounding", found, clipped(lambda _: None))
    # What the remark says of the default.
    both = one.rules + "  - {id: top, action: clip-norm, params: '*', per: rule, max_norm: 1.0}\n"
    code = one.code.replace("max_grad_norm=None", "max_grad_norm=1.0")
    wanted = clipped(eval(code, {"ZClip": theirs.ZClip}).step)
    assert agree(one.same, clipped(lambda _: None, both), wanted)


def test_the_options_of_adagc_are_those_of_the_paper() -> None:
    one = row("AdaGC(")

    def adagc(clip_ratio: float, beta: float, start_clip_steps: int) -> Callable[[nn.Module], None]:
        above = {"times": clip_ratio, "beta": beta, "warmup": start_clip_steps}
        by_hand = ByHand(above, per="parameter")

        def clip(model: nn.Module) -> None:
            by_hand.judge({name: p.grad for name, p in model.named_parameters()})
            by_hand.learn()

        return clip

    found = clipped(lambda _: None, one.rules)
    assert agree(one.same, found, clipped(eval(one.code, {"AdaGC": adagc})))
    assert not agree("rounding", found, clipped(lambda _: None))


def lightning_run(path: Path, rules: str | None = None, code: str = "", **options: Any) -> Any:
    """Train with Lightning; return the weights, what `log_dict` was given, and the session."""
    import lightning
    from lightning.pytorch.utilities import grad_norm

    class Lit(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.logged: list[Any] = []

        def training_step(self, batch: Tensor) -> Tensor:
            loss: Tensor = (self.net(batch) - 1).square().mean() * 30
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            exec(code, {"self": self, "grad_norm": grad_norm})

        def log_dict(self, dictionary: Any, **_: Any) -> None:
            self.logged.append(dictionary)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    model = Lit()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=path, **quiet, **options
    )
    attached: Any = contextlib.nullcontext() if rules is None else gradsurgeon.apply(model, rules)
    with attached as session:
        batches: Any = data(5, 4, 3, 4)
        trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
        found = {}
        if code:
            found = {name: session.history(name) for name, _ in model.named_parameters()}
    return weights_of(model), model.logged, found


@LIGHTNING_WARNINGS
@pytest.mark.parametrize("piece", ["Trainer(gradient_clip_val=1", 'algorithm="value"'])
def test_lightning_clips_to_the_same_weights(piece: str, tmp_path: Path) -> None:
    one = row(piece)
    options = eval(one.code, {"Trainer": dict})
    wanted, *_ = lightning_run(tmp_path, **options)
    assert agree(one.same, lightning_run(tmp_path, one.rules)[0], wanted)
    assert not agree("rounding", lightning_run(tmp_path)[0], wanted)


@LIGHTNING_WARNINGS
def test_lightning_measures_the_same_norms(tmp_path: Path) -> None:
    one = row("grad_norm(self")
    _, logged, found = lightning_run(tmp_path, one.rules, one.code, gradient_clip_val=1.0)
    assert [len(log) for log in found.values()] == [4] * 4
    for name, log in found.items():
        theirs = [float(step[f"grad_2.0_norm/{name}"]) for step in logged]
        assert [value for _, value in log] == pytest.approx(theirs, rel=1e-6)
    # Clipped they would be shorter.
    assert max(value for log in found.values() for _, value in log) > 1.5
