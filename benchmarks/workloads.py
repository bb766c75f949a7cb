"""The models that are trained for a step, on random data. All of them are made here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import nets


@dataclass(slots=True)
class Task:
    """A model that can be trained.

    Attributes:
        model: the module that rules and peers are put on.
        optimizer: updates it. Its learning rate is 0, so that every step computes the same.
        backward: forward and backward of one batch.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[], None]

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, each once."""
        return list(self.model.parameters())


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of model and batch.

    Attributes:
        name: what rows and `--only` call it.
        about: what it is, for the table.
        build: makes a task on a kind of device; the same numbers each time.
        forward: a step has a forward pass; otherwise gradients are given, so that nothing but their
            handling takes time.
        quick: it is part of the quick mode.
        alone: every action is measured alone; elsewhere only what people put together.
        many: it has so many tensors that counting what a lot of rules do on them would fill the memory.
    """

    name: str
    about: str
    build: Callable[[str], Task]
    forward: bool = True
    quick: bool = False
    alone: bool = False
    many: bool = False

    def is_wanted(self, only: Collection[str], *, quick: bool) -> bool:
        """Tell whether it is measured; ``only`` names workloads, where not all are wanted."""
        return self.name in only or not (only or (quick and not self.quick))


def given(count: int, size: int) -> Callable[[str], Task]:
    """Return a builder of tasks whose backward pass does nothing but deliver gradients.

    Args:
        count: how many parameter tensors.
        size: elements of each.
    """

    def build(device: str) -> Task:
        torch.manual_seed(0)
        model = nn.ParameterList(
            [nn.Parameter(torch.randn(size, device=device)) for _ in range(count)]
        )
        params = list(model.parameters())
        grads = [torch.randn(size, device=device) for _ in params]

        def backward() -> None:
            torch.autograd.backward(params, grads)

        return Task(model, _sgd(model), backward)

    return build


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    # The cheapest optimizer that there is: with any other, all shares of a step are smaller.
    return torch.optim.SGD(model.parameters(), lr=0.0)


def _trained(model: nn.Module, loss: Callable[[], Tensor]) -> Task:
    def backward() -> None:
        loss().backward()  # type: ignore[no-untyped-call] # as above

    return Task(model, _sgd(model), backward)


def gpt2(device: str) -> Task:
    """Return GPT-2 124M: float32 on 32 tokens on the CPU, bfloat16 on 8 x 1,024 elsewhere."""
    torch.manual_seed(0)
    dtype, shape = (torch.bfloat16, (8, 1024)) if device == "cuda" else (torch.float32, (1, 32))
    model = nets.Gpt2().to(device=device, dtype=dtype)
    tokens = torch.randint(nets.Gpt2.VOCABULARY, shape, device=device)

    def loss() -> Tensor:
        logits = model(tokens)[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits, tokens[:, 1:].flatten())

    return _trained(model, loss)


def resnet(device: str) -> Task:
    """Return a ResNet-50: two images of 64 x 64 on the CPU, 32 of 224 x 224 elsewhere."""
    torch.manual_seed(0)
    model = nets.ResNet50().to(device)
    count, side = (32, 224) if device == "cuda" else (2, 64)
    images = torch.randn(count, 3, side, side, device=device)
    labels = torch.randint(1000, (count,), device=device)
    return _trained(model, lambda: functional.cross_entropy(model(images), labels))


def embedding(device: str) -> Task:
    """Return a model that is nearly all embedding: 200,000 x 64, with dense gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(200_000, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    model.to(device)
    items = torch.randint(200_000, (256,), device=device)
    labels = torch.randint(8, (256,), device=device)
    return _trained(model, lambda: functional.cross_entropy(model(items), labels))


def small_mlp(device: str) -> Task:
    """Return a small MLP, whose step is so short that whatever is put on it shows."""
    torch.manual_seed(0)
    model = nets.DeepMlp(20, width=64).to(device)
    features = torch.randn(8, 64, device=device)
    return _trained(model, lambda: model(features).square().mean())


def deep_mlp(device: str, layers: int = 5_000) -> Task:
    """Return an MLP of very many small layers: two parameter tensors each."""
    torch.manual_seed(0)
    model = nets.DeepMlp(layers, width=16).to(device)
    features = torch.randn(8, 16, device=device)
    return _trained(model, lambda: model(features).square().mean())


TINY = Workload(
    "tiny",
    "200 tensors of 64, gradients given",
    given(200, 64),
    forward=False,
    quick=True,
    alone=True,
)
WIDE = Workload(
    "wide",
    "100 tensors of 120,000, gradients given",
    given(100, 120_000),
    forward=False,
    quick=True,
    alone=True,
)
GPT2 = Workload("gpt2", "GPT-2 124M, 148 tensors", gpt2)
MLP = Workload("mlp", "MLP of 20 layers of 64, 40 tensors", small_mlp, quick=True)
RESNET = Workload("resnet", "ResNet-50, 25.6 M in 161 tensors", resnet)
EMBEDDING = Workload("embedding", "embedding of 200,000 x 64, 12.8 M in 5 tensors", embedding)
DEEP = Workload("deep-mlp", "MLP of 5,000 layers, 1.4 M in 10,000 tensors", deep_mlp, many=True)
WORKLOADS = (TINY, WIDE, MLP, GPT2, RESNET, EMBEDDING, DEEP)
