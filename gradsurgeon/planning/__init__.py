"""Rules bound to the names of a model: the manifest, the binding and the printed plan."""

from gradsurgeon.planning.binding import NO_MATCH, bind, is_for, obstacles, shortfalls, undecided
from gradsurgeon.planning.manifest import (
    ROOT,
    Manifest,
    Module,
    Param,
    class_names,
    from_model,
    is_scripted,
    named_modules,
    slots,
)
from gradsurgeon.planning.matching import Thing, examples, name_indexes
from gradsurgeon.planning.plan import Binding, Plan
from gradsurgeon.planning.plan_warnings import clashes, curves_of_nothing

__all__ = [
    "NO_MATCH",
    "ROOT",
    "Binding",
    "Manifest",
    "Module",
    "Param",
    "Plan",
    "Thing",
    "bind",
    "clashes",
    "class_names",
    "curves_of_nothing",
    "examples",
    "from_model",
    "is_for",
    "is_scripted",
    "name_indexes",
    "named_modules",
    "obstacles",
    "shortfalls",
    "slots",
    "undecided",
]
