"""Private operations of torch: the package calls none that the table of kernels lacks. See `benchmarks/kernels.py`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import gradsurgeon
from benchmarks import kernels

pytestmark = pytest.mark.slow

PACKAGE = Path(gradsurgeon.__file__).parent
PRIVATE = ("_foreach_", "_amp_", "_fused_")


def called() -> set[str]:
    """Return the names of the private operations in the code of the package."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith(PRIVATE):
                names.add(node.attr)
    return names


def test_the_probe_and_the_table_know_every_private_operation_of_the_package() -> None:
    assert called() == kernels.OPERATIONS.keys() == kernels.read().keys()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_table_is_that_of_this_device() -> None:
    table = kernels.read()
    for operation, row in kernels.probe("cuda").items():
        for dtype, answer in row.items():
            assert table[operation][dtype] in (answer, kernels.NOT_SEEN), (operation, dtype)
