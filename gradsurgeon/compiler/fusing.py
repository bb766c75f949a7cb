"""Neighbouring rules on one tensor as one: what two edits amount to is worked out before run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsurgeon.actions import Rule


@dataclass(frozen=True, slots=True)
class Piece:
    """What runs on a tensor in one go.

    Attributes:
        rule: what is run. Where it stands for several, its id is theirs, joined by ``+``.
        parts: the rules of the file whose work that is, in the order of their effects. Each of them
            is reported on as if it ran by itself.
    """

    rule: Rule
    parts: tuple[Rule, ...]

    @property
    def apart(self) -> tuple[Piece, ...]:
        """The same work rule by rule."""
        return tuple(Piece(rule, (rule,)) for rule in self.parts)


def fuse(chain: Sequence[Rule]) -> tuple[Piece, ...]:
    """Return the pieces of a chain of rules that act on one tensor at one moment."""
    found: list[Piece] = []
    for rule in chain:
        piece = Piece(rule, (rule,))
        # An erasure takes in all that comes before it, one after another.
        while found and (both := _merged(found[-1], piece)) is not None:
            found.pop()
            piece = both
        found.append(piece)
    return tuple(found)


def _merged(earlier: Piece, later: Piece) -> Piece | None:
    first, second = earlier.rule, later.rule
    if not (_is_mergeable(first) and _is_mergeable(second) and first.steps == second.steps):
        return None
    rule = second.merged(first)
    if rule is None:
        return None
    parts = (*earlier.parts, *later.parts)
    return Piece(rule.model_copy(update={"id": "+".join(part.id for part in parts)}), parts)


def _is_mergeable(rule: Rule) -> bool:
    # What only looks must be shown what the rules before it have left. A norm is looked at as well:
    # one that is not finite is an event.
    return rule.role == "edit" and not rule.measures
