"""Review of rules: lint finds problems in a file, diff shows the effect of a change, both in several formats."""

from gradsurgeon.cli.review.linter import lint

__all__ = ["lint"]
