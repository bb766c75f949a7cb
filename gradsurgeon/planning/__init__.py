"""Rules bound to the names of a model: the manifest, the binding and the printed plan."""

from gradsurgeon.planning.binding import NO_MATCH, bind, curves_of_nothing
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
from gradsurgeon.planning.matching import Match, Matcher, examples, is_for, name_indexes
from gradsurgeon.planning.obstacles import MatchedRules, Obstacle, shortfalls
from gradsurgeon.planning.plan import Binding, Plan

__all__ = [
    "NO_MATCH",
    "ROOT",
    "Binding",
    "Manifest",
    "Match",
    "MatchedRules",
    "Matcher",
    "Module",
    "Obstacle",
    "Param",
    "Plan",
    "bind",
    "class_names",
    "curves_of_nothing",
    "examples",
    "from_model",
    "is_for",
    "is_scripted",
    "name_indexes",
    "named_modules",
    "shortfalls",
    "slots",
]
