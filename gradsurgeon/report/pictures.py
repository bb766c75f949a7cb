"""The way to the pictures. Needs no matplotlib before it draws."""

from collections.abc import Sequence
from typing import Any

from gradsurgeon.common._libraries import library

# Pictures that there are no longer, each with what is on the page instead.
_GONE = {"heatmap": "the map of norms is", "histograms": "the bands of histograms are"}


def check(kind: str, known: Sequence[str]) -> None:
    """Raise `ValueError` if there is no such picture here."""
    if kind in _GONE:
        page = "on the page of `gradsurgeon report RUN --html FILE`"
        raise ValueError(f"the picture {kind!r} is gone: {_GONE[kind]} {page}")
    if kind not in known:
        raise ValueError(f"no picture {kind!r} here; there are {', '.join(known)}")


def drawing() -> Any:
    """Return the module that draws, which needs numpy and matplotlib."""
    for name in ("numpy", "matplotlib"):
        library(name, "plot", "drawing")
    from gradsurgeon.report import plots  # noqa: PLC0415 # needs matplotlib

    return plots
