"""Attaches a plan to a model: the hooks, the watch over backward passes and updates, and what rules do there."""

from gradsurgeon._oldest_torch import OLDEST
from gradsurgeon.runtime.attachment import Attachment
from gradsurgeon.runtime.context import Mode, Options
from gradsurgeon.runtime.registry import applied_to, backward, enter, find, tag

__all__ = [
    "OLDEST",
    "Attachment",
    "Mode",
    "Options",
    "applied_to",
    "backward",
    "enter",
    "find",
    "tag",
]
