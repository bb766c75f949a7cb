"""Which dtypes the list kernels of torch have on a device: `python -m benchmarks.kernels [--device cuda] [--write]`.

Torch has kernels on the CPU that it lacks on a GPU, and no build without CUDA can be asked for the others. So this probe
calls, on a device, each private operation that the package uses, and writes what it saw into `results/kernels/cuda.json`.
`tests/unit/test_kernels.py` holds the package against that table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import machine

TABLE = Path(__file__).parent / "results" / "kernels" / "cuda.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RUNS, REFUSES, NOT_SEEN = "runs", "refuses", "not seen"


def _factor(grads: list[Tensor]) -> Tensor:
    return torch.tensor(0.5, device=grads[0].device)


def _norm(grads: list[Tensor]) -> None:
    # Half precision is summed in float32.
    wider = torch.float32 if grads[0].dtype.itemsize == 2 else None
    torch._foreach_norm(grads, 2.0, dtype=wider)  # noqa: SLF001 # what is probed


def _unscale(grads: list[Tensor]) -> None:
    found = torch.zeros(1, device=grads[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, _factor(grads).reshape(1))


# How the package calls each private operation, with the forms that it uses of it.
OPERATIONS: dict[str, tuple[Callable[[list[Tensor]], object], ...]] = {
    "_foreach_norm": (
        _norm,
        lambda grads: torch._foreach_norm(grads, float("inf")),  # noqa: SLF001
    ),
    "_foreach_mul_": (
        lambda grads: torch._foreach_mul_(grads, 0.5),
        lambda grads: torch._foreach_mul_(grads, [0.5, 0.25]),
        lambda grads: torch._foreach_mul_(grads, _factor(grads)),
    ),
    "_foreach_zero_": (torch._foreach_zero_,),
    "_foreach_sub": (lambda grads: torch._foreach_sub(grads, grads),),  # noqa: SLF001
    "_foreach_add_": (lambda grads: torch._foreach_add_(grads, [-grad for grad in grads]),),
    "_foreach_copy_": (lambda grads: torch._foreach_copy_(grads, [-grad for grad in grads]),),
    "_foreach_clamp_min_": (lambda grads: torch._foreach_clamp_min_(grads, -0.5),),
    "_foreach_clamp_max_": (lambda grads: torch._foreach_clamp_max_(grads, 0.5),),
    "_amp_foreach_non_finite_check_and_unscale_": (_unscale,),
}


def probe(device: str) -> dict[str, dict[str, str]]:
    """Return, by operation and dtype, whether the device runs every form of the operation."""
    return {
        name: {str(dtype).removeprefix("torch."): _answer(forms, dtype, device) for dtype in DTYPES}
        for name, forms in OPERATIONS.items()
    }


def _answer(
    forms: tuple[Callable[[list[Tensor]], object], ...], dtype: torch.dtype, device: str
) -> str:
    for form in forms:
        grads = [
            torch.ones(3, dtype=dtype, device=device),
            torch.ones(2, 2, dtype=dtype, device=device),
        ]
        try:
            form(grads)
        except NotImplementedError:  # torch says so where it has no kernel
            return REFUSES
    return RUNS


def read() -> dict[str, dict[str, str]]:
    """Return the committed table: operation, dtype, answer."""
    table: dict[str, dict[str, str]] = json.loads(TABLE.read_text(encoding="utf-8"))["operations"]
    return table


def main() -> None:
    """Probe a device, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    options = parser.parse_args()
    where = {**machine.describe(options.device), "torch": str(torch.__version__)}
    found = {"version": 1, "seen": [where], "operations": probe(options.device)}
    text = json.dumps(found, indent=1)
    print(text)
    if options.write:
        TABLE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
