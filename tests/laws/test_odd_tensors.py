"""Modules that take or give tensors without the usual operations: rules leave them alone, and training goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import sgd, take_step
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning


class Given(nn.Module):
    """Turns its input into something odd and hands it to a module with a parameter of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.taker = Taker()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(x) * self.taker(ODD[self.kind](x))


class Taker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, odd: Tensor) -> Tensor:
        assert odd is not None
        return self.weight


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "conj": lambda x: torch.complex(x, x).conj(),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore:Sparse C:UserWarning", "ignore:The PyTorch API of nested")
def test_training_goes_on_under_fingerprints_and_noise(kind: str) -> None:
    def trained(rules: Any) -> Tensor:
        torch.manual_seed(0)
        model = Given(kind)
        optimizer = sgd(model)
        with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
            for _ in range(2):
                take_step(optimizer, model(torch.full((3, 4), 0.3)).square().mean())
            assert session.latest("head", "projection_1", rule="fingerprint-outputs")
        return model.taker.weight.detach()

    noise = {"id": "noise", "action": "perturb", "modules": "*", "tensor": "input", "eps": 1e-6}
    noisy = {"version": 1, "include": ["gradsurgeon:fingerprint@1"], "rules": [noise]}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", GradSurgeonWarning)
        plain = trained("gradsurgeon:fingerprint@1")
        assert torch.allclose(trained(noisy), plain)
    text = "left taker alone: torch has few operations"
    assert any(text in str(one.message) for one in told) == (kind != "conj")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:enable_nested_tensor")
def test_an_encoder_with_its_fast_path_is_evaluated() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with (
        warnings.catch_warnings(action="ignore", category=GradSurgeonWarning),
        torch.no_grad(),
        gradsurgeon.apply(encoder, "gradsurgeon:fingerprint@1"),
    ):
        assert encoder(torch.randn(2, 5, 8), src_key_padding_mask=padding).isfinite().all()
