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
    "grad-cam": ("name", "rule", "step", "call", "sample", "image"),
}
# A run directory holds no tensors.
_OF_SESSIONS = ("features", "grad-cam")


def draw(source: RecordQueries, kind: str, **options: Any) -> Figure:
    """Draw a session or a run; an option that is ``None`` was not given."""
    kinds = [one for one in _OPTIONS if one not in _OF_SESSIONS or hasattr(source, "captured")]
    if kind not in kinds:
        elsewhere = ": it draws tensors, which only a session keeps" * (kind in _OF_SESSIONS)
        raise ValueError(f"no picture {kind!r} here{elsewhere}; there are {', '.join(kinds)}")
    given = {key: value for key, value in options.items() if value is not None}
    if wrong := [key for key in given if key not in _OPTIONS[kind]]:
        takes = "; ".join(f"{one} takes {', '.join(_OPTIONS[one])}" for one in kinds)
        raise ValueError(f"the picture {kind!r} takes no {wrong[0]}=: {takes}")
    if not isinstance(given.get("rule", ""), str) and kind != "grad-cam":
        raise ValueError(f"the picture {kind!r} takes one rule, and two are for grad-cam")
    try:
        from gradsurgeon.report import captured_plots, plots  # noqa: PLC0415 # need matplotlib
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("matplotlib", "numpy"):
            raise
        raise GradSurgeonError(
            "drawing needs matplotlib, which is not installed: pip install 'gradsurgeon[plot]'"
        ) from error
    functions: dict[str, Any] = {
        "norms": plots.norms,
        "heatmap": plots.heatmap,
        "losses": plots.losses,
        "features": captured_plots.features,
        "grad-cam": captured_plots.cam,
    }
    picture: Figure = functions[kind](source, **given)
    return picture
