"""Healthy trainings in which a careless check would see a fault, for `test_checks`.

Each function returns a model, its optimizers and a loop. Its docstring says what a check could take for a fault.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from laws.trainings import Training, adam, fit, fitted, perceptron, regression, scaled, scheduled
from small import relu_net, sgd, take_step, tanh_net
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.func import functional_call
from torch.nn import functional
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

STEPS = 45
# Schedules and copies in float32 are given a hundred updates.
LONG = 130
# What got no gradient is given two hundred.
VERY_LONG = 205


def _scale_gradients(model: Any, factor: float) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(factor)


def _normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


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
            self.lora_a = nn.Linear(16, 2, bias=False)
            self.lora_b = nn.Linear(2, 4, bias=False)
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
    return scheduled(model, sgd(model, 0.01), lambda step: min(1.0, 1e-6 + step / 100), LONG)


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
    loss_at = fit(lambda inputs: model(inputs.bfloat16()).float())
    return fitted(model, MasterWeights(model.parameters(), lr=1e-4), loss_at, LONG)


def flat_copies() -> Training:
    """The optimizer owns one flat copy of all weights, as ZeRO does, and the script copies it back."""
    model: Any = perceptron()
    params = list(model.parameters())
    flat = nn.Parameter(torch.cat([param.detach().flatten() for param in params]))

    def before(_step: int) -> None:
        flat.grad = torch.cat([param.grad.flatten() for param in params])

    def after(_step: int) -> None:
        nn.utils.vector_to_parameters(flat.detach().clone(), params)

    training = fitted(
        model,
        AdamW([flat], lr=1e-3),
        fit(model),
        STEPS,
        clear=lambda _: model.zero_grad(),
        before=before,
        after=after,
    )
    return replace(training, optimizers=[])


def input_gradients() -> Training:
    """Embeddings are frozen, and each step makes a new leaf of their output, as `enable_input_require_grads` does."""
    embed = nn.Embedding(50, 16).requires_grad_(False)
    head = nn.Linear(16, 50)
    model = nn.ModuleList([embed, head])

    def loss_at(_step: int) -> Tensor:
        words = torch.randint(50, (32,))
        hidden = embed(words).requires_grad_()
        return functional.cross_entropy(checkpoint(head, hidden, use_reentrant=True), words)

    return fitted(model, sgd(head), loss_at, STEPS)


def adversarial() -> Training:
    """Attacks are computed in evaluation mode by a pass of their own, which fills the gradients first."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = adam(model)
    batch = regression()

    def loop() -> None:
        for _ in range(STEPS):
            inputs, targets = batch()
            model.eval()
            attacked: Any = inputs.clone().requires_grad_()
            functional.mse_loss(model(attacked), targets).backward()
            model.train()
            moved = (inputs + 0.01 * attacked.grad.sign()).detach()
            take_step(optimizer, functional.mse_loss(model(moved), targets))

    return Training(model, [optimizer], loop)


def gradient_penalty() -> Training:
    """A critic whose loss contains a gradient with respect to a new leaf, and whose weights are clipped."""
    model = perceptron()
    batch = regression()

    def loss_at(_step: int) -> Any:
        inputs, targets = batch()
        inputs.requires_grad_()
        out = model(inputs)
        (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        return functional.mse_loss(out, targets) + slope.norm()

    @torch.no_grad()
    def after(_step: int) -> None:
        for param in model.parameters():
            param.clamp_(-0.5, 0.5)

    return fitted(model, adam(model), loss_at, STEPS, after=after)


def frozen_with_moving_statistics() -> Training:
    """Fine-tuning: the body is frozen, its batch norm still follows the data, only the head learns."""
    model = _normed().requires_grad_(False)
    head = model[3].requires_grad_(True)
    return fitted(model, adam(head), fit(model), STEPS)


def batch_norms_frozen_late() -> Training:
    """Quantisation-aware training: batch norms go to evaluation mode half way, for good; dropout stays."""
    model = _normed().insert(3, nn.Dropout(0.1))

    def after(step: int) -> None:
        if step == STEPS // 2:
            model[1].eval()

    return fitted(model, adam(model), fit(model), STEPS, after=after)


def tuned_in_evaluation_mode() -> Training:
    """A model that is in evaluation mode from the first step on, on purpose."""
    model = _normed().eval()
    return fitted(model, adam(model), fit(model), STEPS)


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
        return functional.mse_loss(online(inputs), 0.5 * (targets + bootstrap))

    def after(step: int) -> None:
        average.update_parameters(online)
        if step % 20 == 19:
            target.load_state_dict(online.state_dict())

    return fitted(model, adam(online), loss_at, STEPS, after=after)


def upcycled_experts() -> Training:
    """Experts begin as copies of one layer; the router parts them."""
    one = nn.Linear(16, 4)
    experts = nn.ModuleList([copy.deepcopy(one) for _ in range(4)])
    router = nn.Linear(16, 4)
    model = nn.ModuleDict({"experts": experts, "router": router})

    def forward(inputs: Tensor) -> Any:
        weights, chosen = router(inputs).softmax(1).max(1)
        outs = torch.stack([expert(inputs) for expert in experts], 1)
        return weights.unsqueeze(1) * outs[torch.arange(len(inputs)), chosen]

    return fitted(model, adam(model), fit(forward), STEPS)


def zero_head() -> Training:
    """The head begins at zero, so its rows are equal at first; its gradients are not."""
    model = perceptron()
    nn.init.zeros_(model.get_parameter("4.weight"))
    nn.init.zeros_(model.get_parameter("4.bias"))
    return fitted(model, adam(model), fit(model), STEPS)


def bounded_temperature() -> Training:
    """A learnt temperature sits at its upper bound, to which the script clamps it after each update."""
    model: Any = perceptron()
    model.scale = nn.Parameter(torch.tensor(math.log(100.0)))

    @torch.no_grad()
    def after(_step: int) -> None:
        model.scale.clamp_(max=1.0)

    loss_at = fit(lambda inputs: model(inputs) * model.scale)
    return fitted(model, sgd(model, 0.001), loss_at, STEPS, after=after)


def scaled_properly() -> Training:
    """A loss scale, unscaled before the clip, and divided by the number of micro-batches while it is on."""

    def before(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
        _scale_gradients(model, 1 / 2)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return scaled(2, 1024.0, before, STEPS)


def skipped_batches() -> Training:
    """The script itself leaves out updates, and clears gradients of batches that it does not like."""
    model = perceptron()
    optimizer = sgd(model, 0.01)
    loss_at = fit(model)

    def loop() -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_at(step).backward()
            if step % 11 == 5:
                optimizer.zero_grad()
            if step % 7 != 3:
                optimizer.step()

    return Training(model, [optimizer], loop)


def gradient_momentum() -> Training:
    """Gradients are not cleared but decayed, on purpose."""
    model = perceptron()
    decay: Callable[[Any], None] = lambda _: _scale_gradients(model, 0.9)  # noqa: E731
    return fitted(model, sgd(model, 0.001), fit(model), STEPS, clear=decay)


def delayed_gradients() -> Training:
    """Gradients of weights from two updates ago, as in a pipeline: the script sets them, and clears none."""
    model = perceptron()
    loss_of_batch = fit(lambda inputs: functional_call(model, weights[-1], (inputs,)))
    weights: list[dict[str, Tensor]] = []
    losses: list[Tensor] = []
    optimizer = sgd(model, 0.01)

    def loop() -> None:
        for step in range(STEPS):
            weights.append(
                {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
            )
            losses.append(loss_of_batch(step))
            if step > 1:
                losses.pop(0).backward()
                old = weights.pop(0)
                for name, param in model.named_parameters():
                    param.grad = old[name].grad
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

    return fitted(model, adam(model), loss_at, STEPS)


def _of_a_line() -> tuple[nn.Linear, Callable[..., Tensor]]:
    """Return a model and the loss on one batch that it soon fits as well as it can."""
    model = nn.Linear(4, 1)
    inputs = torch.randn(64, 4)
    targets = inputs @ torch.randn(4, 1) + 0.1 * torch.randn(64, 1) + 1

    def loss_at(_step: int = 0) -> Tensor:
        return functional.mse_loss(model(inputs), targets)

    return model, loss_at


def at_its_minimum() -> Training:
    """All gradients are rounding noise after some hundred updates."""
    model, loss_at = _of_a_line()
    return fitted(model, sgd(model), loss_at, 700)


def closures_at_a_minimum() -> Training:
    """LBFGS returns at once where its gradients are small enough."""
    model, loss_at = _of_a_line()
    optimizer = LBFGS(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_at()
        loss.backward()
        return loss

    def loop() -> None:
        for _ in range(STEPS):
            optimizer.step(closure)

    return Training(model, [optimizer], loop)


def schedule_that_ends() -> Training:
    """The learning rate falls to 0 and training goes on."""
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    return scheduled(model, sgd(model, 0.05), lambda step: max(0.0, 1 - step / 100), 320)


def clipped_in_scaled_units() -> Training:
    """The bound of the clip carries the loss scale, which is right."""

    def before(model: nn.Module, _optimizer: Optimizer, scaler: GradScaler) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5 * scaler.get_scale())

    return scaled(1, 1024.0, before, STEPS)


def identities() -> Training:
    """An embedding and a layer both begin as the identity."""
    embed = nn.Embedding(16, 16)
    head = nn.Linear(16, 16, bias=False)
    nn.init.eye_(embed.weight)
    nn.init.eye_(head.weight)
    model = nn.Sequential(embed, head)
    return fitted(model, sgd(model), _next_words(model, 16), STEPS)


def field() -> Training:
    """A field on a grid whose rows are equal by symmetry."""
    values = nn.Parameter(torch.zeros(12, 20))
    model = nn.ParameterList([values])

    def loss_at(_step: int) -> Tensor:
        ends = (values[:, 0] - 1).square().sum() + values[:, -1].square().sum()
        return ends + values.diff(dim=1).square().sum()

    return fitted(model, sgd(model), loss_at, STEPS)


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
        inputs = torch.randn(64, 4)
        noise = torch.randn(64, 4)
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


def loss_network(*, beside: bool = True) -> Training:
    """A network inside the loss gets gradients and never trains: the script left requires_grad on."""
    trained = perceptron()
    judge = relu_net(4, 16, 8).eval()
    model = nn.ModuleDict({"trained": trained, "judge": judge}) if beside else trained
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        return functional.mse_loss(judge(trained(inputs)), judge(targets))

    return fitted(model, adam(trained), loss_at, STEPS)


def last_stage_in_evaluation_mode() -> Training:
    """The last stage trains with all batch norms frozen, by `model.eval()`."""
    model = _normed()

    def after(step: int) -> None:
        if step == STEPS // 2:
            model.eval()

    return fitted(model, adam(model), fit(model), STEPS, after=after)


def head_copied_from_the_table() -> Training:
    """The head begins as a copy of the embedding, and the configuration says that they are trained apart."""

    class Untied(nn.Sequential):
        config = SimpleNamespace(tie_word_embeddings=False)

    embed = nn.Embedding(30, 16)
    head = nn.Linear(16, 30, bias=False)
    head.weight = nn.Parameter(embed.weight.detach().clone())
    model = Untied(embed, head)
    return fitted(model, sgd(model), _next_words(model, 30), STEPS)


def rare_updates() -> Training:
    """One optimizer steps after each eighth pass only, on what has accumulated since."""
    body = nn.Linear(16, 16)
    head = nn.Linear(16, 4)
    model = nn.Sequential(body, nn.Tanh(), head)
    often = sgd(head, 0.01)
    rarely = sgd(body, 0.01)
    loss_at = fit(model)

    def loop() -> None:
        for step in range(LONG):
            if step % 8 == 0:
                rarely.zero_grad()
            take_step(often, loss_at(step))
            if step % 8 == 7:
                rarely.step()

    return Training(model, [often, rarely], loop)


def idle_heads() -> Training:
    """Three heads run and one is trained: the batches of the other tasks are yet to come."""
    body = nn.Linear(16, 16)
    heads = nn.ModuleDict({name: nn.Linear(16, 4) for name in ("near", "far", "flat")})
    model = nn.ModuleDict({"body": body, "heads": heads})

    def forward(inputs: Tensor) -> Any:
        hidden = body(inputs)
        outputs = {name: head(hidden) for name, head in heads.items()}
        return outputs["far"]

    return fitted(model, adam(model), fit(forward), VERY_LONG)


def _with_experts(*, dense: bool) -> Training:
    """Return a training with two experts whose weight is 0; `dense` experts run also then."""
    body = nn.Linear(16, 16)
    experts = nn.ModuleList([nn.Linear(16, 4) for _ in range(4)])
    model = nn.ModuleDict({"body": body, "experts": experts})
    weights = torch.tensor([0.5, 0.0, 0.5, 0.0])

    def forward(inputs: Tensor) -> Tensor:
        hidden = body(inputs)
        out = torch.zeros(len(inputs), 4)
        for weight, expert in zip(weights, experts, strict=True):
            if dense or weight > 0:
                out = out + weight * expert(hidden)
        return out

    return fitted(model, adam(model), fit(forward), VERY_LONG)


def experts_that_no_token_chose() -> Training:
    """Two of four experts have not run yet."""
    return _with_experts(dense=False)


def experts_that_were_masked() -> Training:
    """All experts run, and the gate multiplies two of them by 0."""
    return _with_experts(dense=True)


def _with_side(loss_of: Callable[[Tensor], Tensor], width: int = 16) -> Training:
    """Return a training of two layers, the second of which has a loss of its own."""
    body = nn.Linear(16, 4)
    side = nn.Linear(width, 4)
    loss_at = fit(body)
    model = nn.Sequential(body, side)

    def both(step: int) -> Tensor:
        return loss_at(step) + loss_of(side(torch.randn(8, width)))

    return fitted(model, sgd(model, 0.01), both, VERY_LONG)


def annealed_divergence() -> Training:
    """The coefficient of a divergence is 0 in the first epochs."""
    return _with_side(lambda out: 0.0 * out.square().mean())


def unused_output() -> Training:
    """The script adds 0 times what it does not use, so that each parameter gets a gradient."""
    return _with_side(lambda out: 0 * out.sum())


def free_bits() -> Training:
    """A divergence counts only beyond a bound that it has not reached."""
    return _with_side(lambda out: out.square().clamp(min=1e4).mean())


def weighted_free_bits() -> Training:
    """Each row of such a divergence has a weight of its own."""
    weights = torch.linspace(0.5, 1.5, 8)[:, None]
    return _with_side(lambda out: (weights * out.square().clamp(min=1e4)).mean())


def margin_that_is_kept() -> Training:
    """A hinge whose margin all rows keep."""
    return _with_side(lambda out: functional.relu(out - 1e4).sum())


def experts_with_empty_batches() -> Training:
    """An expert runs on no row."""
    return _with_side(lambda out: torch.zeros(8, 4).index_add(0, torch.arange(0), out[:0]).sum())


def idle_adapter() -> Training:
    """An adapter starts at 0, and no row of the batches is of its task."""
    base = nn.Linear(16, 4)
    down = nn.Linear(16, 2, bias=False)
    up = nn.Linear(2, 4, bias=False)
    nn.init.zeros_(up.weight)
    own = torch.zeros(32, 1)
    model = nn.Sequential(base, down, up)
    forward = fit(lambda inputs: base(inputs) + up(own * down(inputs)))
    return fitted(model, sgd(model, 0.01), forward, VERY_LONG)


def masked_rows() -> Training:
    """The loss leaves out all rows of a task."""
    return _with_side(lambda out: torch.where(torch.zeros(8, 1) > 0, out, 1.0).square().mean())


def term_at_its_minimum() -> Training:
    """A penalty of differences that are 0, written as a product."""

    def penalty(out: Tensor) -> Tensor:
        gap = out - out
        return (gap * gap).sum()

    return _with_side(penalty)


def reward_that_has_not_come() -> Training:
    """All advantages are 0 as long as no reward has come; the critic has an optimizer of its own."""
    model = nn.ModuleDict({"actor": nn.Linear(16, 4), "critic": nn.Linear(16, 1)})
    optimizers = [SGD(part.parameters(), 0.01) for part in model.values()]

    def loop() -> None:
        for _ in range(VERY_LONG):
            states = torch.randn(8, 16)
            advantages = torch.zeros(8)
            log_probs = model["actor"](states).log_softmax(-1)[:, 0]
            take_step(optimizers[0], -(log_probs * advantages).mean())
            take_step(optimizers[1], (model["critic"](states) - 1).square().mean())

    return Training(model, [*optimizers], loop)


def attention_to_one_token() -> Training:
    """A softmax over one token passes no gradient to the queries."""
    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 4)])
    query, value = model

    def forward(inputs: Tensor) -> Tensor:
        tokens = inputs[:, None]
        scores = query(tokens) @ tokens.transpose(1, 2)
        return torch.as_tensor((scores.softmax(-1) @ value(tokens))[:, 0])

    return fitted(model, sgd(model, 0.01), fit(forward), VERY_LONG)


def part_for_evaluations() -> Training:
    """A head runs in evaluations alone, without gradients."""
    model = nn.ModuleList(nn.Linear(16, size) for size in (16, 4, 4))
    inputs = torch.ones(8, 16)
    body, head, probe = model

    def after(step: int) -> None:
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                probe(body(inputs))
            model.train()

    loss_at = fit(lambda inputs: head(body(inputs)))
    return fitted(model, sgd(model, 0.01), loss_at, VERY_LONG, after=after)


def loss_network_of_its_own() -> Training:
    """A network inside the loss belongs to no model that trains, and is in evaluation mode."""
    return loss_network(beside=False)


def target_network_in_the_graph() -> Training:
    """The script copies the network into its target now and then, and does not detach what the target says."""
    model = perceptron()
    target = perceptron()
    batch = regression()

    def loss_at(step: int) -> Tensor:
        if step % LONG == 0:
            target.load_state_dict(model.state_dict())
        inputs, rewards = batch()
        return functional.mse_loss(model(inputs), rewards + 0.5 * target(inputs))

    return fitted(model, sgd(model, 0.01), loss_at, LONG)


def two_models_two_optimizers() -> Training:
    """The passes of one model go through another, whose optimizer steps once in forty passes."""
    model = nn.Linear(16, 16)
    other = nn.Linear(16, 4)
    rarely = sgd(other, 0.01)

    def after(step: int) -> None:
        if step % 40 == 39:
            rarely.step()
            rarely.zero_grad()

    loss_at = fit(lambda inputs: other(model(inputs)))
    return fitted(model, sgd(model, 0.01), loss_at, LONG, after=after)


def optimizers_in_turns() -> Training:
    """Adam first, then SGD, for all parameters."""
    model = perceptron()
    loss_at = fit(model)
    optimizers = [adam(model), sgd(model, 0.01)]

    def loop() -> None:
        for step in range(STEPS):
            take_step(optimizers[2 * step // STEPS], loss_at(step))

    return Training(model, [*optimizers], loop)


HEALTHY: tuple[Callable[[], Training], ...] = tuple(
    value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and name.islower()
    and not name.startswith("_")
)
