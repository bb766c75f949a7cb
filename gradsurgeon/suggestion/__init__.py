"""Rules from the records of a healthy run. Each threshold would have bitten in a share of its steps. Needs numpy."""

from gradsurgeon.suggestion.rule_file import MARK
from gradsurgeon.suggestion.suggest import Suggestion, suggest

__all__ = ["MARK", "Suggestion", "suggest"]
