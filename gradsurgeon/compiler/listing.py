"""A program as text, before and after neighbouring rules are made one, for people to check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradsurgeon.actions import Rule
from gradsurgeon.compiler.fusing import Piece
from gradsurgeon.compiler.program import Program, compile_plan
from gradsurgeon.errors import printable
from gradsurgeon.planning import Plan
from gradsurgeon.planning.table import abridged, count

# By point, what runs on a tensor there.
_Programs = dict[str, tuple[Piece, ...]]


def listing(plan: Plan) -> str:
    """Return the program of each tensor that optimization makes shorter; empty where there is none."""
    return "\n".join(_lines(plan, compile_plan(plan)))


def _lines(plan: Plan, program: Program) -> Iterator[str]:
    groups: dict[tuple[str, ...], tuple[_Programs, list[str]]] = {}
    for name, programs in _shortened(program):
        # Ids tell programs apart: one rule has one point.
        ids = tuple(piece.rule.id for pieces in programs.values() for piece in pieces)
        groups.setdefault(ids, (programs, []))[1].append(name)
    aliases = {param.name: param.aliases for param in plan.manifest.params}
    if groups:
        yield "programs that run shorter than they are written"
    for programs, names in groups.values():
        for point, pieces in programs.items():
            written = [one for piece in pieces for one in piece.apart]
            yield f"  at {point}: {_chain(written)}"
            yield f"{'runs as':>{len(point) + 5}}: {_chain(pieces)}"
        yield f"      {count(len(names), 'parameter')}: {abridged(names, aliases)}"


def _shortened(program: Program) -> Iterator[tuple[str, _Programs]]:
    """Yield each tensor, in model order, with what runs on it at the points where that is shorter."""
    in_update: dict[int, list[Piece]] = {}
    for group in program.in_update:
        for tensor in group.tensors:
            in_update.setdefault(tensor, []).append(group.piece)
    for tensor, name in enumerate(program.names):
        programs = {
            "backward": program.in_hook.get(tensor, ()),
            "step": tuple(in_update.get(tensor, ())),
        }
        shortened = {
            point: pieces
            for point, pieces in programs.items()
            if any(len(piece.parts) > 1 for piece in pieces)
        }
        if shortened:
            yield name, shortened


def _chain(pieces: Sequence[Piece]) -> str:
    return " -> ".join(f"{piece.rule.id} ({_does(piece.rule)})" for piece in pieces)


def _does(rule: Rule) -> str:
    """Return the action of a rule and those of its options that are not the default."""
    fields = type(rule).model_fields
    own = {name: getattr(rule, name) for name in fields if name not in Rule.model_fields}
    given = [f"{name} {_value(it)}" for name, it in own.items() if it != fields[name].default]
    return printable(" ".join([rule.action, ", ".join(given)]).rstrip())


def _value(option: object) -> str:
    return " ".join(map(str, option)) if isinstance(option, tuple) else str(option)
