"""Document -> RuleSet: every problem of a rule file in one pass, each at its place."""

from gradsurgeon.schema._document import Built, Located, bounded
from gradsurgeon.schema._tree import DISK, Files, Inspection, RuleSet, from_rules, inspect, validate
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
