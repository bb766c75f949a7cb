"""Document -> RuleSet: every problem of a rule file in one pass, each at its place."""

from gradsurgeon.schema._document import Built, Located, bounded
from gradsurgeon.schema._tree import (
    Files,
    Inspection,
    RuleSet,
    from_rules,
    inspect,
    pack,
    validate,
)
from gradsurgeon.schema._version import FORMAT, VERSION

__all__ = [
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
    "pack",
    "validate",
]
