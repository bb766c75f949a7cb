"""Rules as they are reviewed: what is wrong with them, what they change, and how that is written."""

from gradsurgeon.review.linter import lint

__all__ = ["lint"]
