"""A name of the package stands for one thing: `tensor` is a tensor, and no two classes share a name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "gradsurgeon"
# An int, or a collection of ints such as `Sequence[int]` or `tuple[int, ...] | None`.
INTS = re.compile(r"(int|\w+\[int(, \.\.\.)?\])( \| None)?")
CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)


def annotated(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the name and the annotation of each parameter, variable, attribute and function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target).rpartition(".")[2], node.annotation
        elif isinstance(node, ast.FunctionDef):
            yield node.name, node.returns


def misnamed(tree: ast.AST) -> list[str]:
    """Return the annotations that call an index, or several, a tensor."""
    return [
        f"{name}: {ast.unparse(annotation)}"
        for name, annotation in annotated(tree)
        if name in ("tensor", "tensors") and annotation is not None
        if INTS.fullmatch(ast.unparse(annotation))
    ]


def test_an_index_is_not_called_a_tensor() -> None:
    found = {
        str(file.relative_to(PACKAGE)): names
        for file in PACKAGE.rglob("*.py")
        if (names := misnamed(ast.parse(file.read_text(encoding="utf-8"))))
    }
    assert found == {}


def test_no_two_classes_share_a_name() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for file in PACKAGE.rglob("*.py"):
        for name in CLASS.findall(file.read_text(encoding="utf-8")):
            places[name].append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
    # Names of torch.
    assert places.keys().isdisjoint({"Tensor", "Parameter", "Module", "Optimizer"})
