"""The way to the pictures: which kinds there are, and what each takes. Needs no matplotlib before it draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsurgeon.errors import GradSurgeonError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gradsurgeon.store import RecordQueries

_KINDS = ("norms", "heatmap", "losses", "features")


def draw(source: RecordQueries, kind: str, **options: Any) -> Figure:
    """Draw a session or a run; an option that is ``None`` was not given."""
    # A run directory holds no tensors.
    kinds = _KINDS if hasattr(source, "captured") else _KINDS[:-1]
    if kind not in kinds:
        raise ValueError(f"no picture {kind!r} here; there are {', '.join(kinds)}")
    given = {key: value for key, value in options.items() if value is not None}
    if kind != "features" and (wrong := sorted(given.keys() - {"name", "rule"})):
        raise ValueError(f"the picture {kind!r} takes no {wrong[0]}=, only name= and rule=")
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
