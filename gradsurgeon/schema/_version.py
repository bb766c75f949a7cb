"""The version of this gradsurgeon, and the check of `requires`."""

import re
from operator import eq, ge, gt, le, lt, ne

VERSION = "0.1.0"
FORMAT = 1

_COMPARISONS = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt}
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+){0,3})")


def meets(version: str, requirement: str) -> bool | None:
    """Tell whether a version meets a requirement such as ``>=0.1, <0.3``; ``None`` for any other text."""

    def release(text: str) -> tuple[int, ...]:
        numbers = [int(part) for part in text.split(".")]
        return tuple(numbers + [0] * (4 - len(numbers)))

    have, results = release(version), []
    for clause in requirement.split(","):
        match = _CLAUSE.fullmatch(clause.strip())
        if match is None:
            return None
        results.append(_COMPARISONS[match[1]](have, release(match[2])))
    return all(results)
