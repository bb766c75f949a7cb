"""The check that no name of a tensor makes a stranger's regular expression slow.

Python's `re` tries one way through an expression after another, and a longer name has more ways. An
expression is accepted only if it has few ways.
"""

import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from gradsurgeon.errors import HintedError

_MAX_COUNT, _AT_ONCE = 64, 16  # most repeats, and repeats that cost nothing
# Most ways through a short name: three `.*`, or two and a `\d+` before a dot. On the longest possible name of a
# file these take some 0.1 s.
_SHORT, _MAX_WAYS = 32, 1 << 15

# The parser of `re` itself, so the judged expression is the one that runs. It has no public name.
_sre: Any = import_module("re._parser")
_sre_compiler: Any = import_module("re._compiler")

_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
_GLOB = 'write a glob, such as "*.layers.{0..5}.*"'


class PatternError(HintedError):
    """A pattern that cannot be used."""


def check_expression(text: str) -> None:
    """Raise `PatternError` unless a text is a regular expression that is quick on every name."""
    # `re` warns about its own future changes, which a rule file cannot mend.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _WaysBound(text).check()
            re.compile(text)
        except PatternError:
            raise
        except re.error as error:
            where = "" if error.pos is None else f" at character {error.pos + len('re:') + 1}"
            raise PatternError(f"not a regular expression: {error.msg}{where}") from None
        except (OverflowError, RecursionError, ValueError) as error:
            raise PatternError(f"not a regular expression: {error}") from None


class _WaysBound:
    """Bounds the number of ways in which `re` may have to try an expression on a short name."""

    def __init__(self, text: str) -> None:
        self._tree = _sre.parse(text)
        # The tree of a part does not have its flags.
        self._exact = not re.search(r"\(\?[a-zA-Z]*i", text)
        self._scans = False  # a repeat with one possible end still takes time to reach it

    def check(self) -> None:
        if self.ways(self._tree, last=True) * (_SHORT if self._scans else 1) > _MAX_WAYS:
            raise PatternError("the expression could take very long on some names", _GLOB)

    def ways(self, tree: Any, *, last: bool = False, counted: int = 0) -> int:
        """Return the bound. ``last``: the name must end here. ``counted``: the runs of the repeats around."""
        items = list(_flat(tree))
        total = 1
        for index, (op, value) in enumerate(items):
            if op in _REPEATS:
                rest = items[index + 1 :]
                sure = self.ends_before(value[2], *rest[0]) if rest else last
                total *= self.repeat(value, counted, sure=sure)
            elif op.startswith("GROUPREF"):
                raise PatternError("back-references are not allowed", _GLOB)
            elif op.startswith("ASSERT"):
                total *= self.ways(value[1], counted=counted)
            elif op == "ATOMIC_GROUP":
                total *= self.ways(value, counted=counted)
            elif op == "BRANCH":
                total *= self.branch(value[1], counted)
        return total

    def branch(self, options: list[Any], counted: int) -> int:
        if counted:
            raise PatternError("alternatives inside a repeat are not allowed", _GLOB)
        ways = [self.ways(option) for option in options]
        firsts = [next(_flat(option), ("", None)) for option in options]
        literals = {value for op, value in firsts if op == "LITERAL"}
        return max(ways) if self._exact and len(literals) == len(options) else sum(ways)

    def repeat(self, value: Any, counted: int, *, sure: bool) -> int:
        low, high, body = value
        unbounded = high == _sre.MAXREPEAT
        if counted and low != high:
            raise PatternError("a repeat inside a repeat is not allowed, as in (a*)*", _GLOB)
        if (low if unbounded else high * max(1, counted)) > _MAX_COUNT:
            raise PatternError(f"something is repeated more than {_MAX_COUNT} times", _GLOB)
        inside = counted if high == 1 else max(1, counted) * (1 if unbounded else max(1, high))
        ways = self.ways(body, counted=inside)
        if sure or low == high:
            self._scans |= high > _AT_ONCE
            return ways
        return ways * (_SHORT if unbounded else high - low + 1)

    def ends_before(self, body: Any, op: str, value: Any) -> bool:
        """Tell whether a repeat can end in one place only: before the first ``value``."""
        if not self._exact or op != "LITERAL" or body.getwidth() != (1, 1):
            return False
        return not _sre_compiler.compile(body).fullmatch(chr(value))


def _flat(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an expression, without groups, and without anchors, which only restrict."""
    for op, value in tree:
        if str(op) == "SUBPATTERN":
            yield from _flat(value[3])
        elif str(op) != "AT":
            yield str(op), value
