"""From the records of a healthy run to rules whose thresholds would have bitten in a share of its steps."""

from gradsurgeon.suggestion.rule_file import MARK
from gradsurgeon.suggestion.suggest import Suggestion, suggest

__all__ = ["MARK", "Suggestion", "suggest"]
