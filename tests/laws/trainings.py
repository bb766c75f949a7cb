"""Small trainings, each with a fault that is known or with none, for `test_callouts_of_trainings`.

A function here returns a model, its optimizers and a loop. Its docstring says what the training is, and
why a remark must or must not come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from ranks import Json
from small import relu_net, sgd, take_step, tanh_net
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

NORMS = {"id": "norms", "action": "norm-log", "params": "*"}
OUTPUTS = {"id": "outputs", "action": "norm-log", "modules": "*", "tensor": "output"}
BACKWARDS = {"id": "backwards", "action": "norm-log", "modules": "*", "tensor": "output.grad"}


@dataclass
class Training:
    """What a test trains under gradsurgeon.

    Attributes:
        model: what rules are applied to.
        optimizers: all that update it.
        loop: trains it.
        rules: what is recorded.
        norms: for each update, the norm of each gradient, if the loop takes notes.
    """

    model: nn.Module
    optimizers: list[Optimizer]
    loop: Callable[[], None]
    rules: tuple[Json, ...] = (NORMS,)
    norms: list[dict[str, float]] = field(default_factory=list)

    def of(self, name: str) -> list[float]:
        """Return the norms of the gradient of one parameter, by update."""
        return [row[name] for row in self.norms]


def adam(model: nn.Module, lr: float = 1e-3) -> Adam:
    return Adam(model.parameters(), lr=lr)


def fitted(
    model: nn.Module,
    optimizer: Optimizer,
    loss_at: Callable[[int], Tensor],
    steps: int,
    *,
    passes: int = 1,
    clear: Callable[[Optimizer], None] = Optimizer.zero_grad,
    before: Callable[[int], None] = lambda _step: None,
    after: Callable[[int], None] = lambda _step: None,
    rules: tuple[Json, ...] = (NORMS,),
) -> Training:
    """Return a training of the plain sort.

    Args:
        model: what is trained.
        optimizer: updates it.
        loss_at: returns the loss of a step.
        steps: how many.
        passes: how many backward passes feed an update.
        clear: called at the begin of a step, to clear the gradients.
        before: called between the backward passes and the update.
        after: called after the update.
        rules: what is recorded.
    """

    def loop() -> None:
        for step in range(steps):
            clear(optimizer)
            for _ in range(passes):
                loss_at(step).backward()
            training.norms.append(
                {
                    name: float(param.grad.double().norm())  # squares of large floats overflow
                    for name, param in model.named_parameters()
                    if param.grad is not None
                }
            )
            before(step)
            optimizer.step()
            after(step)

    training = Training(model, [optimizer], loop, rules)
    return training


def regression(width: int = 16, batch: int = 32) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a source of batches: inputs, and what a fixed random network makes of them."""
    teacher = tanh_net(width, 32, 4).requires_grad_(False)

    def batch_of() -> tuple[Tensor, Tensor]:
        inputs = torch.randn(batch, width)
        return inputs, 3 * teacher(inputs)

    return batch_of


def fit(model: Callable[[Tensor], Tensor]) -> Callable[[int], Tensor]:
    """Return the loss of a model on a new batch of `regression`, by step."""
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        return functional.mse_loss(model(inputs), targets)

    return loss_at


def scheduled(
    model: nn.Module,
    optimizer: Optimizer,
    factor: Callable[[int], float],
    steps: int,
    rules: tuple[Json, ...] = (NORMS,),
) -> Training:
    """Return a plain training on `regression`, whose learning rate is multiplied by a factor of the step."""
    schedule = LambdaLR(optimizer, factor)
    return fitted(
        model, optimizer, fit(model), steps, after=lambda _step: schedule.step(), rules=rules
    )


def scaled(
    passes: int,
    scale: float,
    before: Callable[[nn.Module, Optimizer, GradScaler], None],
    steps: int,
) -> Training:
    """Return a training under a `GradScaler`.

    Args:
        passes: how many feed an update.
        scale: the loss scale at first.
        before: called between the passes and the update.
        steps: how many updates.
    """
    model = perceptron()
    optimizer = sgd(model, 0.01)
    loss_at = fit(model)
    scaler = GradScaler("cpu", init_scale=scale)

    def loop() -> None:
        for step in range(steps):
            optimizer.zero_grad()
            for _ in range(passes):
                scaler.scale(loss_at(step)).backward()
            before(model, optimizer, scaler)
            scaler.step(optimizer)
            scaler.update()

    return Training(model, [optimizer], loop)


def perceptron(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


class Residual(nn.Module):
    """A block whose branch can die while the path around it lives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.relu(self.up(x)))


def residual(width: int = 16, blocks: int = 3) -> nn.Sequential:
    model = nn.Sequential()
    for place in range(blocks):
        model.add_module(f"block{place}", Residual(width))
    model.add_module("head", nn.Linear(width, 4))
    return model


def headed(width: int = 16) -> nn.Sequential:
    """Return a model whose head alone may train."""
    model = residual(width).requires_grad_(False)
    model.get_submodule("head").requires_grad_(True)
    return model


# Trainings with a fault.


def deep_sigmoids() -> Training:
    """Ten sigmoid layers: each passes on a seventh of its gradient, and the lowest get a millionth of it."""
    model = nn.Sequential()
    for place in range(10):
        model.add_module(f"layer{place}", nn.Linear(16, 16))
        model.add_module(f"sigmoid{place}", nn.Sigmoid())
    model.add_module("head", nn.Linear(16, 4))
    return fitted(model, sgd(model, 0.01), fit(model), 100, rules=(NORMS, BACKWARDS))


def diverging(steps: int) -> Training:
    """Two regressions side by side; one has inputs in a wrong unit, and its gradient grows 2.4 times per step.

    The other one converges, and shrinks beside it as it should.
    """
    model = nn.ModuleDict({"lengths": nn.Linear(8, 1), "others": nn.Linear(8, 1)})
    # Orthogonal columns: all directions have the same curvature, and grow alike from first to last.
    lengths = torch.linalg.qr(torch.randn(32, 8))[0] * math.sqrt(32) * 3.0
    others = torch.randn(32, 8)
    targets = torch.randn(32, 2)

    def loss_at(_step: int) -> Tensor:
        found = torch.cat([model["lengths"](lengths), model["others"](others)], 1)
        return 0.5 * (found - targets).square().mean(0).sum()

    return fitted(model, sgd(model, 3.4 / 9), loss_at, steps)


# Trainings without a fault.


def warm_up_and_cosine() -> Training:
    """A warm-up and a cosine to 0: the norm falls fast at first and slowly later, which is no new level."""

    def rate(step: int) -> float:
        if step < 30:
            return (step + 1) / 30
        return 0.5 * (1 + math.cos(math.pi * (step - 30) / 370))

    model = perceptron()
    return scheduled(model, adam(model, 1e-2), rate, 400, (NORMS, OUTPUTS))


def fine_tuning() -> Training:
    """A frozen backbone under a new head: what is frozen is meant to be."""
    model = headed()
    return fitted(model, adam(model.get_submodule("head"), 3e-3), fit(model), 300)


def unfreezing() -> Training:
    """Fine-tuning whose backbone is unfrozen at step 150: more gradients come, and the norm of all is of more."""
    model = headed()

    def after(step: int) -> None:
        if step == 149:
            model.requires_grad_(True)

    return fitted(model, adam(model), fit(model), 300, after=after)


def gan() -> Training:
    """Two players: the pass of the generator leaves gradients in the discriminator that no update consumes."""
    maker = relu_net(8, 32, 2)
    judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    model = nn.ModuleDict({"maker": maker, "judge": judge})
    make, tell = (Adam(one.parameters(), lr=1e-3, betas=(0.5, 0.999)) for one in (maker, judge))
    of = functional.binary_cross_entropy_with_logits

    def loop() -> None:
        for _ in range(300):
            angle = 2 * math.pi * torch.rand(64)
            real = torch.stack([angle.cos(), angle.sin()], 1)
            fake = maker(torch.randn(64, 8))
            tell.zero_grad()
            right = torch.ones(64, 1)
            wrong = torch.zeros(64, 1)
            (of(judge(real), right) + of(judge(fake.detach()), wrong)).backward()
            tell.step()
            take_step(make, of(judge(fake), right))

    return Training(model, [make, tell], loop)


def reinforce() -> Training:
    """Policy gradients with returns of heavy tails: all norms vary from step to step, and none is broken."""
    policy = tanh_net(8, 32, 4)
    best = torch.randint(4, (8,))
    baseline = 0.0

    def loss_at(_step: int) -> Tensor:
        nonlocal baseline
        state = torch.randint(8, (16,))
        choice = torch.distributions.Categorical(
            logits=policy(functional.one_hot(state, 8).float())
        )
        action = choice.sample()
        # Nearly half of the sum is in a tenth of the returns.
        returns = torch.randn(16).mul(1.2).exp() * (1 + (action == best[state]))
        advantage = returns - baseline
        baseline += 0.05 * (float(returns.mean()) - baseline)
        loss: Tensor = -(choice.log_prob(action) * advantage).mean()
        return loss

    return fitted(policy, adam(policy, 3e-3), loss_at, 400)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, whose `lora_B` starts at zero."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, width) / math.sqrt(width))
        self.lora_B = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def lora() -> Training:
    """Adapters on frozen layers: each A has exactly zero gradient at step 0, and a small one soon after."""
    model = nn.Sequential(Adapted(16), nn.Tanh(), Adapted(16), nn.Tanh(), Adapted(16))
    trained = [param for param in model.parameters() if param.requires_grad]
    return fitted(model, AdamW(trained, lr=1e-3), fit(lambda inputs: 3 * model(inputs)[:, :4]), 300)


def batch_norms() -> Training:
    """Linear layers with a bias before batch norm: the gradient of such a bias is zero but for rounding."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    return fitted(
        model,
        SGD(model.parameters(), lr=0.02, momentum=0.9),
        fit(model),
        200,
        rules=(NORMS, BACKWARDS),
    )


class Attention(nn.Module):
    """Attention with a bias in each of its four layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        mixed = functional.scaled_dot_product_attention(
            self.query(x), self.key(x), self.value(x), is_causal=True
        )
        return self.out(mixed)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


TEXT = (
    "A rule names tensors, a moment, and an action. Rules are parsed with line numbers, validated, bound "
    "to a model, compiled into as few hooks as possible, and removed without a trace. "
) * 3


class Characters(nn.Module):
    def __init__(self, known: int, blocks: int, width: int = 24) -> None:
        super().__init__()
        self.token = nn.Embedding(known, width)
        self.place = nn.Embedding(24, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, known, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.head(
            self.norm(self.blocks(self.token(x) + self.place(torch.arange(x.shape[1]))))
        )


def transformer(
    blocks: int = 2, steps: int = 120, rules: tuple[Json, ...] = (NORMS, OUTPUTS)
) -> Training:
    """A transformer on characters: embeddings, norms and layers differ in size, and none of them is broken."""
    alphabet = sorted(set(TEXT))
    text = torch.tensor([alphabet.index(letter) for letter in TEXT])
    model = Characters(len(alphabet), blocks)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

    def loss_at(_step: int) -> Tensor:
        starts = torch.randint(len(text) - 25, (16,))
        rows = text[starts[:, None] + torch.arange(25)]
        return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return fitted(
        model, optimizer, loss_at, steps, after=lambda _step: schedule.step(), rules=rules
    )


def key_biases() -> Training:
    """Softmax does not see what a key bias adds to all scores of a row: its gradient is zero but for rounding."""
    return transformer(blocks=1, steps=150, rules=(NORMS,))


class Experts(nn.Module):
    """Each input goes to the expert that the router likes best, a marked one to the last expert."""

    def __init__(self, width: int, *, number: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, number)
        self.experts = nn.ModuleList(relu_net(width, 16, 4) for _ in range(number))
        with torch.no_grad():
            self.router.weight[-1, 0] = 10.0
            self.router.bias[-1] = -20.0

    def forward(self, x: Tensor) -> Tensor:
        share, choice = self.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 4)
        for place, expert in enumerate(self.experts):
            rows = (choice == place).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, share[rows, None] * expert(x[rows]))
        return out


def experts(*, keep_zeros: bool = False) -> Training:
    """Mixture of experts, top-1: an expert that no input reaches in a step has no gradient in it, or a zero one.

    Marked inputs, of the last expert, are 30 to 70 steps apart. The last of them is 24 steps before the end.
    """
    model = Experts(16)
    batch = regression(batch=8)

    def loss_at(step: int) -> Tensor:
        inputs, targets = batch()
        inputs[:, 0].clamp_(max=1.0)
        if step in {20, 61, 131, 165, 233, 275}:
            inputs[3, 0] = 5.0
        return functional.mse_loss(model(inputs), targets)

    clear = partial(Optimizer.zero_grad, set_to_none=not keep_zeros)
    return fitted(model, adam(model), loss_at, 300, clear=clear)


def experts_with_zeros() -> Training:
    """The same with `zero_grad(set_to_none=False)`: an expert that rests has a gradient of zeros."""
    return experts(keep_zeros=True)


def overfitting() -> Training:
    """Four examples learnt by heart: all gradients shrink together, to less than a millionth, as they should."""
    model = nn.Sequential(tanh_net(8, 64, 64), nn.Tanh(), nn.Linear(64, 2)).double()
    inputs = torch.randn(4, 8).double()
    targets = torch.randn(4, 2).double()

    def loss_at(_step: int) -> Tensor:
        return functional.mse_loss(model(inputs), targets)

    return fitted(model, sgd(model, 0.3), loss_at, 60)


def accumulation() -> Training:
    """Four micro-batches per update: a record is of their sum."""
    model = perceptron()
    return fitted(model, sgd(model, 0.005), fit(model), 150, passes=4)


def lazy_penalty() -> Training:
    """A gradient penalty in every sixteenth step, sixteen times as heavy, as for the discriminator of StyleGAN."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 1))
    teacher = torch.randn(8)

    def loss_at(step: int) -> Tensor:
        inputs = torch.randn(64, 8, requires_grad=step % 16 == 0)
        scores = model(inputs)
        right = (inputs.detach() @ teacher > 0).float()[:, None]
        loss = functional.binary_cross_entropy_with_logits(scores, right)
        if step % 16 == 0:
            (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
            loss = loss + 16 * slope.square().sum(1).mean()
        return loss

    return fitted(model, adam(model), loss_at, 200)
