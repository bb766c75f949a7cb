"""The way to the pictures: which kinds there are, and what each takes. Needs no matplotlib before it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.match import compile_pattern, select, suggest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gradsurgeon.store import RecordQueries

Name = str | Sequence[str]

# What each kind takes.
_OPTIONS = {
    "norms": ("name", "rule"),
    "heatmap": ("name", "rule"),
    "losses": ("name", "rule"),
    "histogram": ("name", "rule", "step", "call"),
    "features": ("name", "rule", "step", "call", "sample"),
    "grad-cam": ("name", "rule", "step", "call", "sample", "image"),
}
# A run directory holds no tensors.
_OF_SESSIONS = ("features", "grad-cam")


def draw(source: RecordQueries, kind: str, **options: object) -> Figure:
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
    return _functions()[kind](source, **given)


def _functions() -> dict[str, Callable[..., Figure]]:
    try:
        from gradsurgeon.report import captured_plots, loss_plots, plots  # noqa: PLC0415 # need matplotlib
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("matplotlib", "numpy"):
            raise
        raise GradSurgeonError(
            "drawing needs matplotlib, which is not installed: pip install 'gradsurgeon[plot]'"
        ) from error
    return {
        "norms": plots.norms,
        "heatmap": plots.heatmap,
        "losses": loss_plots.losses,
        "histogram": captured_plots.histogram,
        "features": captured_plots.features,
        "grad-cam": captured_plots.cam,
    }


def matching(wanted: Name, names: Iterable[str], aliases: Mapping[str, str]) -> list[str]:
    """Return the names that are wanted, by name, alias or pattern, in the order of the model.

    Raises:
        KeyError: a pattern matches nothing; the nearest names are given.
    """
    canonical = {name: name for name in names}
    known = {alias: name for alias, name in aliases.items() if name in canonical} | canonical
    found: set[str] = set()
    for text in [wanted] if isinstance(wanted, str) else wanted:
        # A name may read as a pattern: `lstm[0]` is a tensor of a module that returns several.
        every = list(known)
        places = [every.index(text)] if text in known else select([compile_pattern(text)], every)
        if not places:
            raise KeyError(f'"{text}" is no name of what was recorded; {suggest(text, every)}')
        found.update(known[every[place]] for place in places)
    return [name for name in canonical if name in found]
