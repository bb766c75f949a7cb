"""No module of the package imports itself by way of others. Imports for types and inside functions count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules(package: Path) -> dict[str, Path]:
    """Return the modules of a package by their full names."""
    files = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def imported(name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Return the modules that a module imports: at its top, for types, or inside functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inside = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
            start = inside[: len(inside) + 1 - node.level] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                module = f"{source}.{alias.name}"
                # The name is a submodule, or a function or class of the source.
                yield module if module in known else source


def circles(package: Path) -> set[frozenset[str]]:
    """Return the import circles: groups of modules in which each module reaches all others."""
    known = modules(package)
    uses = {name: {*imported(name, file, known)} & known.keys() for name, file in known.items()}
    reached = {name: closure(name, uses) for name in uses}
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in uses}
    return groups - {frozenset()}


def closure(start: str, uses: dict[str, set[str]]) -> set[str]:
    """Return the modules that `start` reaches, `start` included only if an import leads back to it."""
    found: set[str] = set()
    ahead = [*uses[start]]
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead += uses[module]
    return found


def test_there_is_no_circle() -> None:
    assert circles(ROOT / "gradsurgeon") == set()
