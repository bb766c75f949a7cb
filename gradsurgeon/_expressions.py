"""Regular expressions from strangers: which of them no name of a tensor makes slow.

Python's `re` tries one way through an expression after another, and there are more ways the longer the
name is. An expression is taken only if the ways are few.
"""

import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from gradsurgeon.errors import HintedError

_MAX_COUNT, _AT_ONCE = 64, 16  # how often something is repeated, and how often it is for free
# Ways to match a short name that may have to be tried: three `.*`, or two and a `\d+` before a dot. On
# the longest name that a file may hold these take some 0.1 s.
_SHORT, _MAX_WAYS = 32, 1 << 15

# The parser of `re` itself, so that what is judged is what will run. There is no public one.
_sre: Any = import_module("re._parser")
_sre_compiler: Any = import_module("re._compiler")

_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
_GLOB = 'write a glob, such as "*.layers.{0..5}.*"'


class PatternError(HintedError):
    """A pattern that cannot be used."""


def check_expression(text: str) -> None:
    """Raise `PatternError` if a text is no regular expression, or one that could take very long."""
    # Some expressions make `re` warn about its own future; that is nothing a rule file can mend.
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
        # Flags for a part of the expression are not known where that part is looked at.
        self._exact = not re.search(r"\(\?[a-zA-Z]*i", text)
        self._scans = False  # a repeat that can end in one place only still takes time to get there

    def check(self) -> None:
        if self.ways(self._tree, last=True) * (_SHORT if self._scans else 1) > _MAX_WAYS:
            raise PatternError("the expression could take very long on some names", _GLOB)

    def ways(self, tree: Any, *, last: bool = False, counted: int = 0) -> int:
        """Return the bound. ``last``: the name must end here. ``counted``: how often repeats around this run."""
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
    """Yield the parts of an expression with groups dissolved and without anchors, which only restrict."""
    for op, value in tree:
        if str(op) == "SUBPATTERN":
            yield from _flat(value[3])
        elif str(op) != "AT":
            yield str(op), value
