"""How dense the code of a folder is: ``python tests/rulers.py [FOLDER]`` prints a row for each folder in it, and the whole last.

Nodes of the syntax tree measure how much there is to read; lines measure how a formatter wraps. Docstrings, imports and ``pass``
are no statements here, because each is a statement of few nodes. Annotations count.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DECIDES = (ast.If, ast.While, ast.IfExp, ast.Assert)
COLUMNS = ("comprehensions", "conditionals", "packed", "others")
# A folder of fewer nodes is in the last row only.
SMALL = 2500


def is_docstring(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def is_counted(node: ast.stmt) -> bool:
    """Return whether a node is a statement of the code."""
    return not is_docstring(node) and not isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass))


def size(node: ast.AST) -> int:
    return len(list(ast.walk(node)))


def deciding(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions that only decide: `and` and `or` are no values there."""
    waiting: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, DECIDES):
            waiting.append(node.test)
        elif isinstance(node, ast.comprehension):
            waiting.extend(node.ifs)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (ast.BoolOp, ast.UnaryOp)):
            waiting.extend(ast.iter_child_nodes(node))


def is_bool(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    return isinstance(node, (ast.Compare, ast.BoolOp))


def is_packed(node: ast.AST) -> bool:
    """Return whether a node is an assignment such as `a, b = x, y`."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def is_other(node: ast.AST) -> bool:
    """Return whether a node says several things at once in another way: a lambda, a walrus, `map`, a product with a bool."""
    if isinstance(node, (ast.Lambda, ast.NamedExpr)):
        return True
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in {"map", "filter"}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return is_bool(node.left) or is_bool(node.right)
    return False


def lines_of_code(text: str, tree: ast.AST) -> int:
    documents: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and is_docstring(node) and node.end_lineno is not None:
            documents.update(range(node.lineno, node.end_lineno + 1))
    count = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#") and number not in documents:
            count += 1
    return count


def measured(text: str) -> Counter[str]:
    """Return the counts of one file."""
    tree = ast.parse(text)
    counts: Counter[str] = Counter()
    counts["lines"] = text.count("\n")
    counts["code"] = lines_of_code(text, tree)
    decides = set(deciding(tree))
    for node in ast.walk(tree):
        counts["nodes"] += 1
        if isinstance(node, ast.stmt):
            if is_counted(node):
                counts["statements"] += 1
            else:
                counts["uncounted"] += size(node)
        if isinstance(node, COMPREHENSIONS):
            counts["comprehensions"] += 1
        elif isinstance(node, ast.IfExp):
            counts["conditionals"] += 1
        elif is_packed(node):
            counts["packed"] += 1
        elif is_other(node) or (isinstance(node, ast.BoolOp) and node not in decides):
            counts["others"] += 1
    return counts


def row(name: str, counts: Counter[str]) -> str:
    density = (counts["nodes"] - counts["uncounted"]) / max(counts["statements"], 1)
    thousands = max(counts["code"], 1) / 1000
    shares = [f"{counts[column] / thousands:15.0f}" for column in COLUMNS]
    sizes = f"{counts['lines']:8,}{counts['code']:8,}{counts['nodes']:9,}"
    return f"{name:22}{sizes}{density:17.1f}{''.join(shares)}"


def main(root: Path) -> None:
    folders: dict[str, Counter[str]] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).parts[0]
        folders.setdefault(name, Counter()).update(measured(path.read_text()))
    heads = "".join(f"{column:>15}" for column in COLUMNS)
    sizes = f"{'':22}{'lines':>8}{'code':>8}{'nodes':>9}{'nodes/statement':>17}"
    print(f"{sizes}{heads} per 1,000 lines of code")  # noqa: T201
    whole: Counter[str] = Counter()
    for name in sorted(folders, key=lambda name: -folders[name]["nodes"]):
        whole.update(folders[name])
        if folders[name]["nodes"] > SMALL:
            print(row(name, folders[name]))  # noqa: T201
    print(row("all", whole))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "gradsurgeon"))
