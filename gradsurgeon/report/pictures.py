"""The way to the pictures: which kinds there are, and what each takes. Needs no matplotlib before it draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsurgeon.errors import GradSurgeonError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gradsurgeon.store import RecordQueries

# What each kind takes.
_OPTIONS = {
    "norms": ("name", "rule"),
    "heatmap": ("name", "rule"),
    "losses": ("name", "rule"),
    "features": ("name", "rule", "step", "call", "sample"),
}


def draw(source: RecordQueries, kind: str, **options: Any) -> Figure:
    """Draw a session or a run; an option that is ``None`` was not given."""
    # A run directory holds no tensors.
    kinds = [one for one in _OPTIONS if one != "features" or hasattr(source, "captured")]
    if kind not in kinds:
        elsewhere = ": it draws tensors, which only a session keeps" * (kind == "features")
        raise ValueError(f"no picture {kind!r} here{elsewhere}; there are {', '.join(kinds)}")
    given = {key: value for key, value in options.items() if value is not None}
    if wrong := [key for key in given if key not in _OPTIONS[kind]]:
        takes = "; ".join(f"{one} takes {', '.join(_OPTIONS[one])}" for one in kinds)
        raise ValueError(f"the picture {kind!r} takes no {wrong[0]}=: {takes}")
    try:
        from gradsurgeon.report import captured_plots, plots  # noqa: PLC0415 # need matplotlib
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("matplotlib", "numpy"):
            raise
        raise GradSurgeonError(
            "drawing needs matplotlib, which is not installed: pip install 'gradsurgeon[plot]'"
        ) from error
    room: Any = captured_plots if kind == "features" else plots
    picture: Figure = getattr(room, kind)(source, **given)
    return picture
