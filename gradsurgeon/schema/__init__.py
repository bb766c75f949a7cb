"""Document -> RuleSet: every problem of a rule file in one pass, each at its place."""

from gradsurgeon.schema._document import bounded
from gradsurgeon.schema._located import DISK, Built, Files, Located
from gradsurgeon.schema._tree import Inspection, RuleSet, from_rules, inspect, validate
from gradsurgeon.schema._version import FORMAT, VERSION, meets

__all__ = [
    "DISK",
    "FORMAT",
    "VERSION",
    "Built",
    "Files",
    "Inspection",
    "Located",
    "RuleSet",
    "bounded",
    "from_rules",
    "inspect",
    "meets",
    "validate",
]
