"""Rules bound to the names of a model: the manifest, the binding and the printed plan."""

from gradsurgeon.planning.binding import Binding, Plan, bind, hook_of
from gradsurgeon.planning.manifest import Manifest, Param, Slot, from_model, slots

__all__ = [
    "Binding",
    "Manifest",
    "Param",
    "Plan",
    "Slot",
    "bind",
    "from_model",
    "hook_of",
    "slots",
]
