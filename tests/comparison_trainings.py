"""Trainings with faults that `compare` has to place, and with harmless changes that it must let pass.

Each fault is a change of a training that still runs. Tolerances come from three noise runs, as users measure them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from comparison_nets import Convolutions, Transformer
from ranks import Json
from torch import Tensor, nn
from torch.nn import functional

import gradsurgeon

STEPS, EPS, NOISE = 3, 1e-6, 3
PACK = "gradsurgeon:fingerprint@1"
_SAMPLES, _TOKENS = 8, 32


@dataclass
class Training:
    """A training that faults and harmless changes alter."""

    model: nn.Module
    lr: float = 1e-3
    decay_all: bool = False
    skipped: str = ""
    weight: float = 1.0
    options: Json = field(default_factory=dict)
    data: Callable[[Tensor], Tensor] = lambda x: x

    def groups(self) -> list[Json]:
        params = [p for name, p in self.model.named_parameters() if name != self.skipped]
        flat = [p for p in params if p.dim() < 2]
        return [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.5},
            {"params": flat, "weight_decay": 0.5 * self.decay_all},
        ]


Change = Callable[[Training], object]


class Fault(NamedTuple):
    """A fault, the model it is put into, and the first tensor that shows it."""

    name: str
    model: type[nn.Module]
    change: Change
    place: str


def _attribute(path: str, **values: object) -> Change:
    def change(training: Training) -> None:
        for name, value in values.items():
            setattr(training.model.get_submodule(path), name, value)

    return change


def _fields(**values: object) -> Change:
    def change(training: Training) -> None:
        for name, value in values.items():
            setattr(training, name, value)

    return change


def _untie(training: Training) -> None:
    head: Any = training.model.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach().clone())


def _halve(name: str) -> Change:
    """Halve the gradient of one parameter, as if one of two ranks had not been reduced."""

    def change(training: Training) -> None:
        param: Any = training.model.get_parameter(name)
        param.register_hook(lambda grad: grad / 2)

    return change


def _no_bias(training: Training) -> None:
    fc: Any = training.model.get_submodule("h.1.mlp.fc")
    fc.forward = lambda x: functional.linear(x, fc.weight)


def _circular(training: Training) -> None:
    conv: Any = training.model.get_submodule("blocks.1.conv2")
    conv.padding_mode = "circular"
    conv._reversed_padding_repeated_twice = [1, 1, 1, 1]  # as its constructor does


def _swapped(x: Tensor) -> Tensor:
    return x[torch.arange(len(x)).roll(1)]


FAULTS = (
    Fault("attention scaled by 1/d", Transformer, _attribute("h.1.attn", scale=1 / 16), "input of h.1.attn.o"),
    Fault("causal mask off by one", Transformer, _attribute("h.1.attn", ahead=1), "input of h.1.attn.o"),
    Fault("heads of the keys flipped", Transformer, _attribute("h.1.attn", flipped=True), "input of h.1.attn.o"),
    Fault("eps of LayerNorm 1e-3", Transformer, _attribute("h.1.ln1", eps=1e-3), "output of h.1.ln1"),
    Fault("GELU by tanh", Transformer, _attribute("h.1.mlp.act", approximate="tanh"), "output of h.1.mlp.act"),
    Fault("activations rounded to bfloat16", Transformer, _attribute("h.1.mlp", rounded=True), "input of h.1.mlp.act"),
    Fault("bias left out", Transformer, _no_bias, "output of h.1.mlp.fc"),
    Fault("dropout left on", Transformer, _attribute("h.1.mlp.drop", p=0.1), "output of h.1.mlp.drop"),
    Fault("positions shifted by one", Transformer, _attribute("", shift=1), "output of pos"),
    Fault("detach in the MLP", Transformer, _attribute("h.1.mlp", detached=True), "output gradient of h.1.mlp.act"),
    Fault("loss doubled", Transformer, _fields(weight=2.0), "output gradient of head"),
    Fault("one gradient not reduced", Transformer, _halve("h.1.mlp.out.weight"), "gradient of h.1.mlp.out.weight"),
    Fault("learning rate 1% higher", Transformer, _fields(lr=1.01e-3), "weight emb.weight after the update"),
    Fault("parameter not optimized", Transformer, _fields(skipped="h.1.attn.q.weight"), "final gradient of h.1.attn.q.weight"),
    Fault("weight decay on biases", Transformer, _fields(decay_all=True), "weight h.0.ln1.weight after the update"),
    Fault("batch norm in eval mode", Convolutions, lambda t: t.model.get_submodule("blocks.1.bn1").eval(), "output of blocks.1.bn1"),
    Fault("circular padding", Convolutions, _circular, "output of blocks.1.conv2"),
    Fault("residual scaled", Convolutions, _attribute("blocks.1", kept=0.9), "input of blocks.1.relu (call 2 of 2)"),
    Fault("samples in another order", Convolutions, _fields(data=_swapped), "input of stem"),
    Fault("head not tied", Transformer, _untie, "gradient of emb.weight"),
)  # fmt: skip


def _layout(training: Training) -> None:
    """Store all matrices column by column, and filters with the channels last."""
    for p in training.model.parameters():
        if p.dim() == 4:
            p.data = p.data.to(memory_format=torch.channels_last)
        elif p.dim() == 2:
            p.data = p.data.t().contiguous().t()
    training.data = lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x


def _fused_attention(training: Training) -> None:
    for module in training.model.modules():
        if hasattr(module, "fused"):
            vars(module)["fused"] = True


HARMLESS: Mapping[str, Change] = {
    "two threads": lambda _: torch.set_num_threads(2),
    "memory layout": _layout,
    "fused optimizer": _fields(options={"fused": True}),
    "foreach off": _fields(options={"foreach": False}),
    "order of equal samples": _fields(data=lambda x: x[torch.arange(len(x)) ^ 1]),
    "fused attention": _fused_attention,
}


def _batches(model: type[nn.Module], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches in which every sample is there twice, side by side."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(STEPS):
        if model is Transformer:
            x = torch.randint(0, 97, (_SAMPLES // 2, _TOKENS), generator=generator)
            y = x.roll(-1, 1)
        else:
            x = torch.randn(_SAMPLES, 3, 16, 16, generator=generator)
            y = torch.randint(0, 10, (_SAMPLES,), generator=generator)
        found.append((x.repeat_interleave(2, 0), y.repeat_interleave(2, 0)))
    return found


def train(
    path: Path,
    kind: type[nn.Module],
    seed: int,
    change: Change | None = None,
    *,
    noise: int = 0,
    parts: int = 1,
    start: int = 0,
) -> Path:
    """Train a few steps with a change, and record fingerprints.

    Args:
        path: where to record.
        kind: the model.
        seed: of the weights and the data.
        change: what is different.
        noise: the seed of noise on what modules with parameters take, 0 without noise.
        parts: the number of micro-batches.
        start: the number of the first step.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    training = Training(kind())
    if change is not None:
        change(training)
    model = training.model
    optimizer = torch.optim.AdamW(training.groups(), training.lr, **training.options)
    rules = noisy(noise, EPS) if noise else PACK
    with (
        # A fault may be one that the session tells by itself, such as a parameter without an optimizer.
        warnings.catch_warnings(action="ignore", category=gradsurgeon.GradSurgeonWarning),
        gradsurgeon.apply(model, rules, optimizer=optimizer, record=path, start_step=start),
    ):
        for step, batch in enumerate(_batches(kind, seed)):
            torch.manual_seed(step)
            for x, y in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
                logits = model(training.data(x)).flatten(0, -2)
                loss = functional.cross_entropy(logits, y.flatten())
                total: Any = training.weight * loss / parts
                total.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.set_num_threads(1)
    return path


def noisy(seed: int, eps: float) -> Json:
    """Return the rules of a noise run, as `gradsurgeon run --perturb` makes them."""
    noise = {"action": "perturb", "modules": "*", "where": {"owns_params": True}, "eps": eps}
    tensors = {"noise-in": "input", "noise-back": "output.grad"}
    rules = [{"id": id_, "tensor": one, "seed": seed, **noise} for id_, one in tensors.items()]
    return {"version": 1, "include": [PACK], "rules": rules}


def compared(folder: Path, kind: type[nn.Module], seed: int, changes: Mapping[str, Change]) -> Json:
    """Return the comparison of each change with the same training without it."""
    reference = train(folder / "reference", kind, seed)
    noise = [train(folder / f"noise{one}", kind, seed, noise=one) for one in range(1, NOISE + 1)]
    return {
        name: gradsurgeon.compare(
            train(folder / f"run{number}", kind, seed, change), reference, noise
        )
        for number, (name, change) in enumerate(changes.items())
    }
