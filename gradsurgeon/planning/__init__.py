"""Rules bound to the names of a model: the manifest, the binding and the printed plan."""

from gradsurgeon.planning.binding import bind, shortfalls
from gradsurgeon.planning.breaks import graph_breaks
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
from gradsurgeon.planning.plan import Binding, Plan, hook_of

__all__ = [
    "ROOT",
    "Binding",
    "Manifest",
    "Module",
    "Param",
    "Plan",
    "Slot",
    "bind",
    "from_model",
    "graph_breaks",
    "hook_of",
    "named_modules",
    "shortfalls",
    "slots",
    "walk",
]
