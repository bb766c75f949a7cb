"""Healthy trainings in which a careless check would see a fault, for `test_checks`.

Each function returns a model, its optimizers and a loop. Its docstring says what a check could take for a fault.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from laws.trainings import Training, fit, fitted, perceptron, regression, scaled
from ranks import Json
from small import relu_net, sgd, tanh_net
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

STEPS = 45
# Schedules and copies in float32 are given a hundred updates.
LONG = 130
# What got no gradient is given two hundred.
VERY_LONG = 205


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _scale_gradients(model: nn.Module, factor: float) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(factor)


def _next_words(model: nn.Module, known: int) -> Callable[[int], Tensor]:
    """Return a loss on random words, of which each has the next one as its target."""

    def loss_at(_step: int) -> Tensor:
        words = torch.randint(known, (32,))
        return functional.cross_entropy(model(words), words.roll(1))

    return loss_at


def lora_pair() -> Training:
    """`B` starts at zero, so `A` gets no gradient in the first step; the base is frozen."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 4).requires_grad_(False)
            self.lora_a, self.lora_b = nn.Linear(16, 2, bias=False), nn.Linear(2, 4, bias=False)
            nn.init.zeros_(self.lora_b.weight)

        def forward(self, x: Tensor) -> Any:
            return self.base(x) + self.lora_b(self.lora_a(x))

    model = Adapted()
    trained = [param for param in model.parameters() if param.requires_grad]
    return fitted(model, AdamW(trained, lr=1e-3), fit(model), STEPS)


def rare_rows_of_a_large_table(*, sparse: bool = False) -> Training:
    """A batch moves four rows of 20,000: a fixed sample of the table misses all of them."""
    model = nn.Sequential(nn.Embedding(20_000, 16, sparse=sparse), nn.Linear(16, 4))

    def loss_at(step: int) -> Tensor:
        words = torch.tensor([0, 1, 2, step % 50])
        return functional.cross_entropy(model(words), words % 4)

    return fitted(model, sgd(model, 1e-2), loss_at, STEPS)


def sparse_rows() -> Training:
    """The same with sparse gradients."""
    return rare_rows_of_a_large_table(sparse=True)


def warm_up_from_zero() -> Training:
    """The first epoch of thirty updates runs at a learning rate of 0."""
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    schedule = LambdaLR(optimizer, lambda epoch: min(1.0, epoch / 5))

    def after(step: int) -> None:
        if step % 30 == 29:
            schedule.step()

    return fitted(model, optimizer, fit(model), LONG, after=after)


def warm_up_by_steps() -> Training:
    """A learning rate that begins at a millionth of its value."""
    model = perceptron()
    optimizer = sgd(model, 0.01)
    schedule = LinearLR(optimizer, start_factor=1e-6, total_iters=100)
    return fitted(model, optimizer, fit(model), LONG, after=lambda _step: schedule.step())


class MasterWeights(Adam):
    """Keeps a float32 copy of each weight in its state and rounds it into the model after each update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "master" not in state:
                    state["master"] = param.float()
                state["master"] -= group["lr"] * param.grad.float().sign()
                param.copy_(state["master"])


def master_weights() -> Training:
    """A bfloat16 weight moves only once its float32 copy has moved by one bfloat16 step."""
    model = perceptron().bfloat16()
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        return functional.mse_loss(model(inputs.bfloat16()).float(), targets)

    return fitted(model, MasterWeights(model.parameters(), lr=1e-4), loss_at, LONG)


def flat_copies() -> Training:
    """The optimizer owns one flat copy of all weights, as ZeRO does, and the script copies it back."""
    model = perceptron()
    params = list(model.parameters())
    flat = nn.Parameter(torch.cat([param.detach().flatten() for param in params]))
    optimizer = AdamW([flat], lr=1e-3)
    loss_at = fit(model)

    def loop() -> None:
        for step in range(STEPS):
            model.zero_grad()
            loss_at(step).backward()
            flat.grad = torch.cat([_gradient(param).flatten() for param in params])
            optimizer.step()
            with torch.no_grad():
                parts = flat.split([param.numel() for param in params])
                for param, part in zip(params, parts, strict=True):
                    param.copy_(part.view_as(param))

    return Training(model, [], loop)


def input_gradients() -> Training:
    """Embeddings are frozen, and each step makes a new leaf of their output, as `enable_input_require_grads` does."""
    embed, head = nn.Embedding(50, 16).requires_grad_(False), nn.Linear(16, 50)
    model = nn.ModuleList([embed, head])

    def loss_at(_step: int) -> Tensor:
        words = torch.randint(50, (32,))
        hidden = embed(words).requires_grad_()
        return functional.cross_entropy(checkpoint(head, hidden, use_reentrant=True), words)

    return fitted(model, sgd(head), loss_at, STEPS)


def adversarial() -> Training:
    """Attacks are computed in evaluation mode by a pass of their own, which fills the gradients first."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = Adam(model.parameters(), lr=1e-3)
    batch = regression()

    def loop() -> None:
        for _ in range(STEPS):
            inputs, targets = batch()
            model.eval()
            attacked = inputs.clone().requires_grad_()
            functional.mse_loss(model(attacked), targets).backward()
            model.train()
            optimizer.zero_grad()
            moved = (inputs + 0.01 * _gradient(attacked).sign()).detach()
            functional.mse_loss(model(moved), targets).backward()
            optimizer.step()

    return Training(model, [optimizer], loop)


def gradient_penalty() -> Training:
    """A critic whose loss contains a gradient with respect to a new leaf, and whose weights are clipped."""
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=1e-3)
    batch = regression()

    def loop() -> None:
        for _ in range(STEPS):
            inputs, targets = batch()
            inputs.requires_grad_()
            out = model(inputs)
            (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
            optimizer.zero_grad()
            (functional.mse_loss(out, targets) + slope.norm()).backward()
            optimizer.step()
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-0.5, 0.5)

    return Training(model, [optimizer], loop)


def _of_two_paces() -> tuple[nn.Module, SGD, SGD]:
    """Return a model, the optimizer of its head, and that of its body."""
    body, head = nn.Linear(16, 16), nn.Linear(16, 4)
    model = nn.Sequential(body, nn.Tanh(), head)
    return model, sgd(head, 0.01), sgd(body, 0.01)


def frozen_with_moving_statistics() -> Training:
    """Fine-tuning: the body is frozen, its batch norm still follows the data, only the head learns."""
    body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()).requires_grad_(False)
    head = nn.Linear(32, 4)
    model = nn.Sequential(body, head)
    return fitted(model, Adam(head.parameters(), lr=1e-3), fit(model), STEPS)


def batch_norms_frozen_late() -> Training:
    """Quantisation-aware training: batch norms go to evaluation mode half way, for good; dropout stays."""
    norm = nn.BatchNorm1d(32)
    model = nn.Sequential(nn.Linear(16, 32), norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def after(step: int) -> None:
        if step == STEPS // 2:
            norm.eval()

    return fitted(model, Adam(model.parameters(), lr=1e-3), fit(model), STEPS, after=after)


def tuned_in_evaluation_mode() -> Training:
    """A model that is in evaluation mode from the first step on, on purpose."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).eval()
    return fitted(model, Adam(model.parameters(), lr=1e-3), fit(model), STEPS)


def copied_layers() -> Training:
    """`TransformerEncoder` copies one layer, so its layers begin equal in every bit."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(30, 16),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(16, 30),
    )

    def loss_at(_step: int) -> Tensor:
        words = torch.randint(30, (8, 6))
        return functional.cross_entropy(model(words).transpose(1, 2), words.roll(1, 1))

    return fitted(model, AdamW(model.parameters(), lr=1e-3), loss_at, STEPS)


def averages_and_targets() -> Training:
    """A moving average and a target network copy the weights; nothing trains either of them."""
    online = perceptron()
    target = copy.deepcopy(online)
    average = AveragedModel(online)
    model = nn.ModuleDict({"online": online, "target": target})
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        with torch.no_grad():
            bootstrap = target(inputs)
        return functional.mse_loss(online(inputs), 0.5 * targets + 0.5 * bootstrap)

    def after(step: int) -> None:
        average.update_parameters(online)
        if step % 20 == 19:
            target.load_state_dict(online.state_dict())

    return fitted(model, Adam(online.parameters(), lr=1e-3), loss_at, STEPS, after=after)


def upcycled_experts() -> Training:
    """Experts begin as copies of one layer; the router parts them."""
    one = nn.Linear(16, 4)
    experts = nn.ModuleList([copy.deepcopy(one) for _ in range(4)])
    router = nn.Linear(16, 4)
    model = nn.ModuleDict({"experts": experts, "router": router})
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        weights, chosen = router(inputs).softmax(1).max(1)
        outs = torch.stack([expert(inputs) for expert in experts], 1)
        picked = outs[torch.arange(len(inputs)), chosen]
        return functional.mse_loss(weights.unsqueeze(1) * picked, targets)

    return fitted(model, Adam(model.parameters(), lr=1e-3), loss_at, STEPS)


def zero_head() -> Training:
    """The head begins at zero, so its rows are equal at first; its gradients are not."""
    model = perceptron()
    nn.init.zeros_(model.get_parameter("4.weight"))
    nn.init.zeros_(model.get_parameter("4.bias"))
    return fitted(model, Adam(model.parameters(), lr=1e-3), fit(model), STEPS)


def bounded_temperature() -> Training:
    """A learnt temperature sits at its upper bound, to which the script clamps it after each update."""

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron()
            self.scale = nn.Parameter(torch.tensor(math.log(100.0)))

        def forward(self, x: Tensor) -> Any:
            return self.net(x) * self.scale

    model = Contrast()

    def after(_step: int) -> None:
        with torch.no_grad():
            model.scale.clamp_(max=1.0)

    return fitted(model, sgd(model, 0.001), fit(model), STEPS, after=after)


def scaled_properly() -> Training:
    """A loss scale, unscaled before the clip, and divided by the number of micro-batches while it is on."""

    def before(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
        _scale_gradients(model, 1 / 2)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return scaled(2, 1024.0, before, STEPS)


def divided_while_scaled() -> Training:
    """Gradients are divided by a constant while they carry the loss scale, which is right."""

    def before(model: nn.Module, _optimizer: Optimizer, _scaler: GradScaler) -> None:
        _scale_gradients(model, 1 / 4)

    return scaled(4, 1024.0, before, STEPS)


def skipped_batches() -> Training:
    """The script itself leaves out updates, and clears gradients of batches that it does not like."""
    model = perceptron()
    optimizer = sgd(model, 0.01)
    loss_at = fit(model)

    def loop() -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_at(step).backward()
            if step % 7 == 3:
                continue
            if step % 11 == 5:
                optimizer.zero_grad()
            optimizer.step()

    return Training(model, [optimizer], loop)


def hand_written() -> Training:
    """The script updates the weights itself, without an optimizer."""
    model = perceptron()
    loss_at = fit(model)

    def loop() -> None:
        for step in range(STEPS):
            loss_at(step).backward()
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(_gradient(param), alpha=-1e-2)
                    param.grad = None

    return Training(model, [], loop)


def gradient_momentum() -> Training:
    """Gradients are not cleared but decayed, on purpose."""
    model = perceptron()
    optimizer = sgd(model, 0.001)
    loss_at = fit(model)

    def loop() -> None:
        for step in range(STEPS):
            _scale_gradients(model, 0.9)
            loss_at(step).backward()
            optimizer.step()

    return Training(model, [optimizer], loop)


def points_of_a_derivative() -> Training:
    """The inputs are leaves that want a gradient, and the same ones in each step, as in physics-informed training."""
    model = tanh_net(1, 16, 1)
    points = torch.linspace(0, 1, 50).unsqueeze(1).requires_grad_()

    def loss_at(_step: int) -> Tensor:
        out = model(points)
        (slope,) = torch.autograd.grad(out.sum(), points, create_graph=True)
        start: Tensor = model(torch.zeros(1, 1))
        loss: Tensor = (slope + out).square().mean() + (start - 1).square().mean()
        return loss

    return fitted(model, Adam(model.parameters(), lr=1e-3), loss_at, STEPS)


def at_its_minimum() -> Training:
    """All gradients are rounding noise after some hundred updates."""
    model, inputs = nn.Linear(4, 1), torch.randn(64, 4)
    targets = inputs @ torch.randn(4, 1) + 0.1 * torch.randn(64, 1) + 1

    def loss_at(_step: int) -> Tensor:
        return functional.mse_loss(model(inputs), targets)

    return fitted(model, sgd(model), loss_at, 700)


def closures_at_a_minimum() -> Training:
    """LBFGS returns at once where its gradients are small enough."""
    model, inputs = nn.Linear(4, 1), torch.randn(64, 4)
    targets = inputs @ torch.randn(4, 1) + 0.1 * torch.randn(64, 1) + 1
    optimizer = LBFGS(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    def loop() -> None:
        for _ in range(STEPS):
            optimizer.step(closure)

    return Training(model, [optimizer], loop)


def schedule_that_ends() -> Training:
    """The learning rate falls to 0 and training goes on."""
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = sgd(model, 0.05)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 100))
    return fitted(model, optimizer, fit(model), 320, after=lambda _step: schedule.step())


def group_that_waits() -> Training:
    """One group has a learning rate of 0 until the script sets one."""
    model = perceptron()
    groups: list[Json] = [
        {"params": [*model[0].parameters()], "lr": 0.0},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    optimizer = Adam(groups, lr=1e-3)

    def after(step: int) -> None:
        if step == 30:
            optimizer.param_groups[0]["lr"] = 1e-4

    return fitted(model, optimizer, fit(model), STEPS, after=after)


def clipped_in_scaled_units() -> Training:
    """The bound of the clip carries the loss scale, which is right."""

    def before(model: nn.Module, _optimizer: Optimizer, scaler: GradScaler) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5 * scaler.get_scale())

    return scaled(1, 1024.0, before, STEPS)


def identities() -> Training:
    """An embedding and a layer both begin as the identity."""
    embed, head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
    nn.init.eye_(embed.weight)
    nn.init.eye_(head.weight)
    model = nn.Sequential(embed, head)
    return fitted(model, sgd(model), _next_words(model, 16), STEPS)


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(12, 20))

    def forward(self) -> Any:
        ends = (self.values[:, 0] - 1).square().sum() + self.values[:, -1].square().sum()
        return ends + self.values.diff(dim=1).square().sum()


def field() -> Training:
    """A field on a grid whose rows are equal by symmetry."""
    model = Field()
    return fitted(model, sgd(model), lambda _step: model.forward(), STEPS)


class Proximal(SGD):
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.mul_((1 - 0.1 / param.norm().clamp(min=1e-9)).clamp(min=0))
        return found


def group_lasso() -> Training:
    """A proximal step holds the weights at 0 that explain nothing."""
    model = nn.ModuleDict(
        {"used": nn.Linear(4, 1, bias=False), "useless": nn.Linear(4, 1, bias=False)}
    )

    def loss_at(_step: int) -> Tensor:
        inputs, noise = torch.randn(64, 4), torch.randn(64, 4)
        out = model["used"](inputs) + model["useless"](noise)
        return functional.mse_loss(out, inputs.sum(1, keepdim=True))

    return fitted(model, Proximal(model.parameters(), lr=0.1), loss_at, STEPS)


def losses_that_the_script_skips() -> Training:
    """The script looks at the loss and leaves out updates on a NaN."""
    model = nn.Linear(16, 4)
    optimizer = sgd(model, 0.01)

    def loop() -> None:
        for step in range(STEPS):
            labels = torch.full((8,), -100 if step % 10 == 5 else 0)
            loss = functional.cross_entropy(model(torch.randn(8, 16)), labels)
            optimizer.zero_grad()
            loss.backward()
            if loss.isfinite():
                optimizer.step()

    return Training(model, [optimizer], loop)


def loss_network() -> Training:
    """A network inside the loss gets gradients and never trains: the script left requires_grad on."""
    trained = perceptron()
    judge = relu_net(4, 16, 8).eval()
    model, batch = nn.ModuleDict({"trained": trained, "judge": judge}), regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        return functional.mse_loss(judge(trained(inputs)), judge(targets))

    return fitted(model, Adam(trained.parameters(), lr=1e-3), loss_at, STEPS)


def last_stage_in_evaluation_mode() -> Training:
    """The last stage trains with all batch norms frozen, by `model.eval()`."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

    def after(step: int) -> None:
        if step == STEPS // 2:
            model.eval()

    return fitted(model, Adam(model.parameters(), lr=1e-3), fit(model), STEPS, after=after)


def last_epochs_in_evaluation_mode() -> Training:
    """The same in a script that evaluates after each epoch, and returned to training mode before."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    loss_at = fit(model)

    def after(step: int) -> None:
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                loss_at(step)
            model.train(step < STEPS // 2)

    return fitted(model, Adam(model.parameters(), lr=1e-3), loss_at, STEPS, after=after)


def head_copied_from_the_table() -> Training:
    """The head begins as a copy of the embedding, and the configuration says that they are trained apart."""

    class Untied(nn.Sequential):
        config = SimpleNamespace(tie_word_embeddings=False)

    embed, head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
    head.weight = nn.Parameter(embed.weight.detach().clone())
    model = Untied(embed, head)
    return fitted(model, sgd(model), _next_words(model, 30), STEPS)


def rare_updates() -> Training:
    """One optimizer steps after each eighth pass only, on what has accumulated since."""
    model, often, rarely = _of_two_paces()
    loss_at = fit(model)

    def loop() -> None:
        for step in range(LONG):
            if step % 8 == 0:
                rarely.zero_grad()
            often.zero_grad()
            loss_at(step).backward()
            often.step()
            if step % 8 == 7:
                rarely.step()

    return Training(model, [often, rarely], loop)


def idle_heads() -> Training:
    """Three heads run and one is trained: the batches of the other tasks are yet to come."""
    body = nn.Linear(16, 16)
    heads = nn.ModuleDict({name: nn.Linear(16, 4) for name in ("near", "far", "flat")})
    model, batch = nn.ModuleDict({"body": body, "heads": heads}), regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        hidden = body(inputs)
        outputs = {name: head(hidden) for name, head in heads.items()}
        return functional.mse_loss(outputs["far"], targets)

    return fitted(model, Adam(model.parameters(), lr=1e-3), loss_at, VERY_LONG)


def _with_experts(weights: Tensor, *, dense: bool) -> Training:
    """Return a training whose experts get these weights; `dense` experts run also for a weight of 0."""
    body, experts = nn.Linear(16, 16), nn.ModuleList([nn.Linear(16, 4) for _ in weights])
    model, batch = nn.ModuleDict({"body": body, "experts": experts}), regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        hidden = body(inputs)
        out = torch.zeros_like(targets)
        for weight, expert in zip(weights, experts, strict=True):
            if dense or weight > 0:
                out = out + weight * expert(hidden)
        return functional.mse_loss(out, targets)

    return fitted(model, Adam(model.parameters(), lr=1e-3), loss_at, VERY_LONG)


def experts_that_no_token_chose() -> Training:
    """Two of four experts have not run yet."""
    return _with_experts(torch.tensor([0.5, 0.0, 0.5, 0.0]), dense=False)


def experts_that_were_masked() -> Training:
    """All experts run, and the gate multiplies two of them by 0."""
    return _with_experts(torch.tensor([0.5, 0.0, 0.5, 0.0]), dense=True)


def table_that_no_batch_used() -> Training:
    """A batch may bring the feature whose table the mask has left out so far."""
    words, rare, head = nn.Embedding(30, 16), nn.Embedding(5, 16), nn.Linear(16, 30)
    model = nn.Sequential(words, rare, head)

    def loss_at(_step: int) -> Tensor:
        known = torch.randint(30, (32,))
        return functional.cross_entropy(head(words(known) + 0 * rare(known % 5)), known)

    return fitted(model, sgd(model, 0.1), loss_at, VERY_LONG)


def part_for_evaluations() -> Training:
    """A head runs in evaluations alone, without gradients."""
    body, head, probe = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
    model, batch = nn.Sequential(body, head, probe), regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        return functional.mse_loss(head(body(inputs)), targets)

    def after(step: int) -> None:
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                probe(body(batch()[0]))
            model.train()

    return fitted(model, sgd(model, 0.01), loss_at, VERY_LONG, after=after)


def loss_network_of_its_own() -> Training:
    """A network inside the loss belongs to no model that trains, and is in evaluation mode."""
    model = perceptron()
    judge = relu_net(4, 16, 8).eval()
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        return functional.mse_loss(judge(model(inputs)), judge(targets))

    return fitted(model, Adam(model.parameters(), lr=1e-3), loss_at, STEPS)


def two_models_two_optimizers() -> Training:
    """The passes of one model go through another, whose optimizer steps once in forty passes."""
    model, other, batch = nn.Linear(16, 16), nn.Linear(16, 4), regression()
    often, rarely = sgd(model, 0.01), sgd(other, 0.01)

    def loop() -> None:
        for step in range(LONG):
            inputs, targets = batch()
            often.zero_grad()
            functional.mse_loss(other(model(inputs)), targets).backward()
            often.step()
            if step % 40 == 39:
                rarely.step()
                rarely.zero_grad()

    return Training(model, [often], loop)


def optimizers_in_turns() -> Training:
    """Adam first, then SGD, for all parameters."""
    model = perceptron()
    loss_at = fit(model)
    first, second = Adam(model.parameters(), lr=1e-3), sgd(model, 0.01)

    def loop() -> None:
        for step in range(STEPS):
            optimizer = first if step < STEPS // 2 else second
            optimizer.zero_grad()
            loss_at(step).backward()
            optimizer.step()

    return Training(model, [first, second], loop)


def branches_that_begin_at_zero() -> Training:
    """The last layer of each residual branch is 0, so the layers before it get no gradient in the first step."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.bias)

        def forward(self, x: Tensor) -> Any:
            return x + self.last(self.first(x).relu())

    model = nn.Sequential(Residual(), Residual(), nn.Linear(16, 4))
    return fitted(model, sgd(model, 0.01), fit(model), STEPS)


HEALTHY: tuple[Callable[[], Training], ...] = tuple(
    value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and name.islower()
    and not name.startswith("_")
)
