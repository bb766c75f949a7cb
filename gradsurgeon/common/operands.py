"""Words for the operands of an operation. Needs no torch."""

import re

# The noun of each operation, and its operands by their names in PyTorch.
_OPERATIONS = {
    "div": ("a division", {"self": "dividend", "other": "divisor"}),
    "mul": ("a product", {"self": "first factor", "other": "second factor"}),
    "pow": ("a power", {"self": "base", "exponent": "exponent"}),
    "add": ("a sum", {"self": "first summand", "other": "second summand"}),
    "sub": ("a difference", {"self": "first operand", "other": "second operand"}),
}
_NODE = re.compile(r"(?P<name>\w+?)Backward\d*")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def operand(operation: str, name: str) -> str:
    """Return the word for one operand, such as ``divisor``; its name if there is no better word."""
    _, words = _known(operation)
    word = words.get(name, name)
    if word == "self":
        return "input"
    return word


def operand_of(node: str, name: str) -> str:
    """Return ``the divisor of a division`` for a node of autograd such as ``DivBackward0``."""
    noun, _ = _known(node)
    return f"the {operand(node, name)} of {noun} ({node})"


def _known(operation: str) -> tuple[str, dict[str, str]]:
    node = _NODE.match(operation)
    if node is None:
        stem = operation.rpartition(".")[2].rstrip("_")
    else:
        stem = _WORD.sub("_", node["name"]).lower()
    return _OPERATIONS.get(stem, (stem, {}))
