"""Small trainings as public scripts write them, each with changes that should not matter and faults that should show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from comparison_nets import Transformer
from comparison_trainings import PACK, noisy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradsurgeon

# Imported by others from here, too.
__all__ = ["PACK", "noisy"]
STEPS = 4


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


def language(recording: Recording, *, autocast: bool = False) -> None:
    """Train a small transformer with AdamW; one block alone has the change."""
    how = recording.how
    model = Transformer(32)
    block: Any = model.h[1]
    block.attn.joined = how == "one product for q, k and v"
    block.attn.fused = how == "fused attention"
    block.attn.ahead = int(how == "mask off by one")
    if how == "checkpoints":
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    decay = 0.05 if how == "another weight decay" else 0.1
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    data = torch.Generator().manual_seed(1)
    parts = 4 if how == "accumulated, not divided" else 1
    falls = 2 if how == "schedule begins a step late" else 1
    with recording.of((model, optimizer)):
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1.0 if step < falls else 0.9)
            tokens = torch.randint(0, 97, (8, 25), generator=data)
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
    """Train the transformer under autocast to bfloat16."""
    language(recording, autocast=True)


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


TRAININGS = {one.__name__: one for one in (language, mixed, codes, pictures)}
HARMLESS = (
    Trial("language", "one product for q, k and v"),
    Trial("language", "checkpoints"),
    Trial("language", "other kernels"),
    Trial("mixed", "fused attention"),
    Trial("codes", "sigmoid by a method"),
    Trial("codes", "sums in another order"),
    Trial("codes", "other kernels"),
    Trial("pictures", "one backward pass of both losses"),
    Trial("pictures", "other kernels"),
)
FAULTS = (
    Trial("language", "another weight decay", ("update", "weight emb.weight after the update")),
    Trial("language", "accumulated, not divided", ("gradient", "")),
    Trial("language", "schedule begins a step late", ("update", "weight emb.weight after the update")),
    Trial("language", "no clip", ("gradient", "final gradient of ")),
    Trial("mixed", "mask off by one", ("forward", "input of h.1.attn.o")),
    Trial("codes", "variance for deviation", ("forward", "input of dec")),
    Trial("codes", "divergence halved", ("backward", "output gradient of ")),
    Trial("pictures", "another rate of the discriminator", ("Discriminator", "update", "weight 0.weight after the update")),
    Trial("pictures", "labels smoothed", ("Discriminator", "backward", "output gradient of 2")),
    Trial("pictures", "another activation of the generator", ("Generator", "forward", "output of 1")),
    Trial("pictures", "noise of another size", ("Generator", "forward", "input of 0")),
    Trial("pictures", "discriminator not recorded", ("model Discriminator",)),
)  # fmt: skip
