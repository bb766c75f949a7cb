"""The way to the pictures, and the picture of a captured tensor. Needs no matplotlib before it draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradsurgeon.common._libraries import library
from gradsurgeon.errors import RecordError
from gradsurgeon.language.planning import ModuleEntry, Param

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from gradsurgeon.records.store import RecordQueries

# Pictures that there are no longer, each with what to use instead.
_GONE = {"heatmap": "the map of norms is on the page of `gradsurgeon report RUN --html FILE`"}
_CHANNELS, _PER_ROW = 64, 8
_IMAGES = 4  # dimensions of several images


def draw(source: RecordQueries, kind: str, **options: Any) -> Figure:
    """Draw a session or a run; an option that is ``None`` was not given."""
    if kind in _GONE:
        raise ValueError(f"the picture {kind!r} is gone: {_GONE[kind]}")
    kinds = ["norms"]
    # A run directory holds no tensors.
    if hasattr(source, "captured"):
        kinds.append("features")
    if kind not in kinds:
        raise ValueError(f"no picture {kind!r} here; there are {', '.join(kinds)}")
    given = {key: value for key, value in options.items() if value is not None}
    if kind != "features" and (wrong := sorted(given.keys() - {"name", "rule"})):
        raise ValueError(f"the picture {kind!r} takes no {wrong[0]}=, only name= and rule=")
    for name in ("numpy", "matplotlib"):
        library(name, "plot", "drawing")
    if kind == "features":
        return _features(source, **given)
    from gradsurgeon.report import plots  # noqa: PLC0415 # needs matplotlib

    return plots.norms(source, **given)


def _features(
    session: Any,
    *,
    name: str | Sequence[str] | None = None,
    rule: str | None = None,
    step: int | None = None,
    call: int | None = None,
    sample: int = 0,
) -> Figure:
    """Draw the channels of one sample of a tensor of shape (N, C, H, W), each from its least to its largest."""
    from matplotlib import colormaps  # noqa: PLC0415 # optional

    from gradsurgeon.report.plots import NONFINITE, Picture, plain  # noqa: PLC0415 # needs matplotlib

    (name, step, call), tensor = _kept(session, rule or _rule(session), name, step, call)
    maps = _sample(name, tensor, sample)
    shown = maps[:_CHANNELS]
    rows, (height, width) = -(-len(shown) // _PER_ROW), maps.shape[1:]
    inches = 0.7 + rows * (1.1 * min(3.0, max(0.4, height / width)) + 0.15)
    figure = Picture(1.15 * _PER_ROW, inches)
    colours = colormaps["gray"].with_extremes(bad=NONFINITE)
    for number, channel in enumerate(shown):
        axes = figure.add_subplot(rows, _PER_ROW, number + 1)
        axes.imshow(channel.numpy(), cmap=colours)
        axes.set_title(str(number), fontsize=6, pad=1.5)
        axes.set_axis_off()
    calls = f", call {call}" * bool(call)
    of = f" of {len(maps)}" * (len(maps) > len(shown))
    title = f"{plain(name)}, step {step}{calls}, sample {sample}: {len(shown)}{of} channels of {height} x {width}"
    figure.suptitle(title, fontsize=9)
    return figure


def _rule(session: Any) -> str:
    ids = [one.id for one in session.plan.rules.rules if one.role == "capture"]
    if not ids:
        raise RecordError(
            'no rule keeps tensors: add one, such as {id: maps, action: capture, modules: "layer4", tensor: output}'
        )
    if len(ids) > 1:
        raise ValueError(f"several rules keep tensors: pass rule= one of {', '.join(ids)}")
    return str(ids[0])


def _kept(
    session: Any, rule: str, name: str | Sequence[str] | None, step: int | None, call: int | None
) -> tuple[tuple[str, int, int], Tensor]:
    from gradsurgeon.report.plots import matching  # noqa: PLC0415 # needs matplotlib

    kept = session.captured(rule)
    manifest = session.plan.manifest
    named: tuple[ModuleEntry | Param, ...] = (*manifest.modules, *manifest.params)
    aliases = {alias: one.name for one in named for alias in one.aliases}
    names = list(dict.fromkeys(one for one, _, _ in kept))
    names = names if name is None or not kept else matching(name, names, aliases)
    if len(names) > 1:
        raise ValueError(
            f"rule {rule} has kept {len(names):,} tensors: pass name=, such as {names[0]}"
        )
    found = [key for key in kept if key[0] in names and step in (None, key[1])]
    found = sorted(key for key in found if call in (None, key[2]))
    if not found:
        of = f" of step={step}, call={call}" if kept else " yet"
        raise RecordError(f"rule {rule} has kept nothing{of}: see `session.captured({rule!r})`")
    return found[-1], kept[found[-1]]


def _sample(name: str, tensor: Tensor, sample: int) -> Tensor:
    """Return the channels of one sample; of complex elements the magnitudes."""
    from gradsurgeon.tensors import _dist  # noqa: PLC0415 # needs torch, as only captures do

    if _dist.is_sharded(tensor) or tensor.dim() != _IMAGES:
        raise ValueError(
            f"{name} has the shape {list(tensor.shape)}, and feature maps have (N, C, H, W), whole on one rank: "
            "capture a module that returns such, and choose it by name="
        )
    if not 0 <= sample < len(tensor):
        raise ValueError(f"sample {sample} of {name} is not there: there are {len(tensor)}, from 0")
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return (dense.abs() if dense.is_complex() else dense)[sample].cpu().double()
