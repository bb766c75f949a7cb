"""Rules bound to the names of a model: the manifest, the binding and the printed plan."""

from gradsurgeon.planning.binding import NO_MATCH, bind, is_for, obstacles, shortfalls, undecided
from gradsurgeon.planning.breaks import outside_graphs
from gradsurgeon.planning.manifest import (
    ROOT,
    Manifest,
    Module,
    Param,
    Slot,
    from_model,
    named_modules,
    slots,
    walk,
)
from gradsurgeon.planning.matching import Names, Thing, examples
from gradsurgeon.planning.plan import Binding, Plan, hook_of

__all__ = [
    "NO_MATCH",
    "ROOT",
    "Binding",
    "Manifest",
    "Module",
    "Names",
    "Param",
    "Plan",
    "Slot",
    "Thing",
    "bind",
    "examples",
    "from_model",
    "hook_of",
    "is_for",
    "named_modules",
    "obstacles",
    "outside_graphs",
    "shortfalls",
    "slots",
    "undecided",
    "walk",
]
