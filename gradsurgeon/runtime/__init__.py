"""Attaches a plan to a model: the hooks, the watch over backward passes and updates, and what rules do there."""

from gradsurgeon.runtime._oldest_torch import OLDEST as OLDEST
from gradsurgeon.runtime.attachment import Attachment as Attachment
from gradsurgeon.runtime.context import SessionOptions as SessionOptions
from gradsurgeon.runtime.refusals import Guard as Guard
from gradsurgeon.runtime.registry import applied_to as applied_to
from gradsurgeon.runtime.registry import backward as backward
from gradsurgeon.runtime.registry import enter as enter
from gradsurgeon.runtime.registry import find as find
from gradsurgeon.runtime.registry import tag as tag
