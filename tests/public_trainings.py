"""Small trainings as public scripts write them, each with changes that should not matter and faults that should show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ranks import Json
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradsurgeon

PACK = "gradsurgeon:fingerprint@1"
STEPS = 4


def noisy(seed: int, eps: float) -> Json:
    """Return the rules of a noise run, as `gradsurgeon run --perturb` makes them."""
    noise = {"action": "perturb", "modules": "*", "where": {"owns_params": True}, "eps": eps}
    rules = [
        {"id": "noise-in", "tensor": "input", "seed": seed, **noise},
        {"id": "noise-back", "tensor": "output.grad", "seed": seed, **noise},
    ]
    return {"version": 1, "include": [PACK], "rules": rules}


class Recording:
    """Where a training records, by which rules; `how` names the change, which each training looks at."""

    def __init__(self, path: Path, how: str = "", rules: Any = PACK) -> None:
        self.path = path
        self.how = how
        self.rules = rules

    @contextlib.contextmanager
    def of(self, *models: tuple[nn.Module, torch.optim.Optimizer]) -> Iterator[None]:
        """Record models as the launcher does: further ones in folders inside the run of the first."""
        with contextlib.ExitStack() as stack:
            for number, (model, optimizer) in enumerate(models):
                place = self.path / type(model).__name__ if number else self.path
                stack.enter_context(
                    gradsurgeon.apply(model, self.rules, optimizer=optimizer, record=place)
                )
            yield


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, how: str) -> None:
        super().__init__()
        self.heads, self.how = heads, how
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        if self.how == "one product for q, k and v":
            weights = torch.cat([one.weight for one in (self.q, self.k, self.v)])
            biases = torch.cat([one.bias for one in (self.q, self.k, self.v)])
            projected: Any = functional.linear(x, weights, biases).chunk(3, -1)
        else:
            projected = (self.q(x), self.k(x), self.v(x))
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in projected)
        if self.how == "fused attention":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            ahead = 2 if self.how == "mask off by one" else 1
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(ahead).bool()
            scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, 4, how)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """The head is tied to the embedding."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.wte, self.wpe = nn.Embedding(60, 32), nn.Embedding(24, 32)
        # One block alone has the change.
        self.h = nn.ModuleList([Block(32, ""), Block(32, how), Block(32, "")])
        self.ln_f, self.head = nn.LayerNorm(32), nn.Linear(32, 60, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Any:
        y = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            y = checkpoint(block, y, use_reentrant=False) if self.how == "checkpoints" else block(y)
        y = self.ln_f(y)
        if self.how == "head by a function":
            return functional.linear(y, self.wte.weight)
        return self.head(y)


def language(recording: Recording, *, autocast: bool = False) -> None:
    """Train a small GPT with AdamW."""
    how = recording.how
    model = Gpt(how)
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    decay = 0.05 if how == "another weight decay" else 0.1
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    data = torch.Generator().manual_seed(1)
    parts = 4 if how == "accumulated, not divided" else 1
    with recording.of((model, optimizer)):
        for step in range(STEPS):
            if how == "schedule begins a step late":
                optimizer.param_groups[0]["lr"] = 1e-3 * (1.0 if step < 2 else 0.9)
            else:
                optimizer.param_groups[0]["lr"] = 1e-3 * (1.0 if step < 1 else 0.9)
            tokens = torch.randint(0, 60, (8, 25), generator=data)
            optimizer.zero_grad()
            for part in tokens.chunk(parts):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = model(part[:, :-1])
                    loss: Any = functional.cross_entropy(
                        logits.flatten(0, 1), part[:, 1:].flatten()
                    )
                loss.backward()
            if how != "no clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


def mixed(recording: Recording) -> None:
    """Train the GPT under autocast to bfloat16."""
    language(recording, autocast=True)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.drop = nn.Embedding(40, 24), nn.Dropout(0.2)
        self.rnn, self.fc = nn.LSTM(24, 32, 2, batch_first=True), nn.Linear(32, 40)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        y, state = self.rnn(self.drop(self.emb(x)), state)
        return self.fc(y), state


def words(recording: Recording) -> None:
    """Train an LSTM on words, whose state goes from batch to batch."""
    how = recording.how
    model = Lstm()
    if how == "dropout left out":
        model.drop.p = 0.0
    options: Json = {"foreach": False} if how == "optimizer tensor by tensor" else {}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, **options)
    data = torch.Generator().manual_seed(1)
    state = None
    with recording.of((model, optimizer)):
        for step in range(STEPS):
            x = torch.randint(0, 40, (6, 13), generator=data)
            torch.manual_seed(step)
            logits, state = model(x[:, :-1], None if how == "state not kept" else state)
            state = tuple(one.detach() for one in state)
            if how == "loss in float64":
                logits = logits.double()
            loss: Any = functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
            if how == "weighted loss":
                loss = loss * 1.02
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Vae(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.enc = nn.Sequential(nn.Linear(49, 64), nn.ReLU())
        self.mu, self.logvar = nn.Linear(64, 6), nn.Linear(64, 6)
        self.dec = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 49))
        self.squash = nn.Sigmoid()

    def forward(self, x: Tensor) -> Any:
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        std = logvar.exp() if self.how == "variance for deviation" else (0.5 * logvar).exp()
        y = self.dec(mu + torch.randn_like(std) * std)
        return (y.sigmoid() if self.how == "sigmoid by a method" else self.squash(y)), mu, logvar


def codes(recording: Recording) -> None:
    """Train a variational autoencoder."""
    how = recording.how
    model = Vae(how)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1)
    with recording.of((model, optimizer)):
        for step in range(STEPS):
            x = torch.rand(16, 49, generator=data)
            torch.manual_seed(step)
            y, mu, logvar = model(x)
            parts = functional.binary_cross_entropy(y, x, reduction="none")
            if how == "sums in another order":
                likelihood = parts.t().flip(0).sum(1).sum()
            else:
                likelihood = parts.sum()
            divergence = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum()
            if how == "divergence halved":
                divergence = divergence / 2
            optimizer.zero_grad()
            (likelihood + divergence).backward()
            optimizer.step()


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


def pictures(recording: Recording) -> None:
    """Train a GAN: two models with an optimizer each."""
    how = recording.how
    act = nn.LeakyReLU(0.05) if how == "another activation of the generator" else nn.ReLU()
    generator = Generator(nn.Linear(8, 32), act, nn.Linear(32, 36), nn.Tanh())
    critic = Discriminator(nn.Linear(36, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    rate = 2.02e-4 if how == "another rate of the discriminator" else 2e-4
    of_critic = torch.optim.Adam(critic.parameters(), lr=rate, betas=(0.5, 0.999))
    judge = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(12, 1), torch.zeros(12, 1)
    data = torch.Generator().manual_seed(1)
    models = [(generator, of_generator), (critic, of_critic)]
    with recording.of(*models[: 1 if how == "discriminator not recorded" else 2]):
        for _ in range(STEPS):
            real = torch.rand(12, 36, generator=data) * 2 - 1
            noise = torch.randn(12, 8, generator=data)
            if how == "noise of another size":
                noise = noise * 1.01
            fake = generator(noise)
            critic.zero_grad()
            smooth = 0.9 if how == "labels smoothed" else 1.0
            loss_real = judge(critic(real), ones * smooth)
            loss_fake = judge(critic(fake.detach()), zeros)
            if how == "one backward pass of both losses":
                (loss_real + loss_fake).backward()
            else:
                loss_real.backward()
                loss_fake.backward()
            of_critic.step()
            generator.zero_grad()
            judge(critic(fake), ones).backward()
            of_generator.step()


class Trial(NamedTuple):
    """A change of a training, and where a fault shows: the model if there are two, the phase and the first tensor."""

    training: str
    how: str
    place: tuple[str, ...] = ()


TRAININGS = {one.__name__: one for one in (language, mixed, words, codes, pictures)}
HARMLESS = (
    Trial("language", "one product for q, k and v"),
    Trial("language", "head by a function"),
    Trial("language", "checkpoints"),
    Trial("language", "other kernels"),
    Trial("mixed", "fused attention"),
    Trial("mixed", "head by a function"),
    Trial("words", "optimizer tensor by tensor"),
    Trial("words", "loss in float64"),
    Trial("words", "other kernels"),
    Trial("codes", "sigmoid by a method"),
    Trial("codes", "sums in another order"),
    Trial("codes", "other kernels"),
    Trial("pictures", "one backward pass of both losses"),
    Trial("pictures", "other kernels"),
)
FAULTS = (
    Trial("language", "another weight decay", ("update", "weight wte.weight after the update")),
    Trial("language", "accumulated, not divided", ("gradient", "")),
    Trial("language", "schedule begins a step late", ("update", "weight wte.weight after the update")),
    Trial("language", "no clip", ("gradient", "final gradient of ")),
    Trial("mixed", "mask off by one", ("forward", "input of h.1.attn.out")),
    Trial("words", "dropout left out", ("forward", "output of drop")),
    Trial("words", "state not kept", ("forward", "output of rnn")),
    Trial("words", "weighted loss", ("backward", "output gradient of fc")),
    Trial("codes", "variance for deviation", ("forward", "input of dec")),
    Trial("codes", "divergence halved", ("backward", "output gradient of ")),
    Trial("pictures", "another rate of the discriminator", ("Discriminator", "update", "weight 0.weight after the update")),
    Trial("pictures", "labels smoothed", ("Discriminator", "backward", "output gradient of 2")),
    Trial("pictures", "another activation of the generator", ("Generator", "forward", "output of 1")),
    Trial("pictures", "noise of another size", ("Generator", "forward", "input of 0")),
    Trial("pictures", "discriminator not recorded", ("model Discriminator",)),
)  # fmt: skip
