"""Words for the operands of an operation. Needs no torch."""

import re

# The noun of each operation, and the words for its first and second operand.
_WORDS = {
    "div": ("a division", "dividend", "divisor"),
    "mul": ("a product", "first factor", "second factor"),
    "pow": ("a power", "base", "exponent"),
    "add": ("a sum", "first summand", "second summand"),
    "sub": ("a difference", "first operand", "second operand"),
}
_PLACES = {"self": 1, "other": 2, "exponent": 2}


def operand(operation: str, name: str) -> str:
    """Return the word for an operand of ``aten.div`` or ``DivBackward0``, such as ``divisor``; else its name in PyTorch."""
    words = _WORDS.get(_stem(operation))
    if words is not None and name in _PLACES:
        return words[_PLACES[name]]
    if name == "self":
        return "input"
    return name


def operand_of(node: str, name: str) -> str:
    """Return ``the divisor of a division (DivBackward0)``."""
    stem = _stem(node)
    noun, *_ = _WORDS.get(stem, (stem,))
    return f"the {operand(node, name)} of {noun} ({node})"


def _stem(operation: str) -> str:
    name = re.sub(r"Backward\d.*", "", operation.rpartition(".")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().rstrip("_")
