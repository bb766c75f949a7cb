"""The picture of a tensor that a `capture` rule has kept: its channels as images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps

from gradsurgeon.errors import RecordError
from gradsurgeon.planning import Module, Param
from gradsurgeon.report.names import Name, matching
from gradsurgeon.report.plots import NONFINITE, Picture, plain
from gradsurgeon.report.spikes import Floats

if TYPE_CHECKING:
    from torch import Tensor

_CHANNELS, _PER_ROW = 64, 8
_IMAGES = 4  # dimensions of several images


def features(
    source: Any,
    *,
    name: Name | None = None,
    rule: str | None = None,
    step: int | None = None,
    call: int | None = None,
    sample: int = 0,
) -> Picture:
    """Draw the channels of one sample of a tensor of shape (N, C, H, W), each from its least to its largest."""
    rule = rule or _rule(source)
    (name, step, call), tensor = _kept(source, rule, name, step, call)
    maps = _sample(name, tensor, sample)
    shown = maps[:_CHANNELS]
    columns = min(_PER_ROW, len(shown))
    rows, (height, width) = -(-len(shown) // columns), maps.shape[1:]
    inches = 0.7 + rows * (1.1 * min(3.0, max(0.4, height / width)) + 0.15)
    figure = Picture(max(5.0, 1.15 * columns), inches, layout="none")
    place = {"left": 0.01, "right": 0.99, "bottom": 0.01, "top": 1 - 0.6 / inches}
    grid = figure.add_gridspec(rows, columns, wspace=0.06, hspace=0.2, **place)
    colours = colormaps["gray"].with_extremes(bad=NONFINITE)
    for number, channel in enumerate(shown):
        axes = figure.add_subplot(grid[number // columns, number % columns])
        axes.imshow(np.ma.masked_invalid(_normalised(channel)), vmin=0, vmax=1, cmap=colours)
        axes.set_title(str(number), fontsize=6, pad=1.5)
        axes.set_axis_off()
    calls = f", call {call}" * bool(call)
    of = f" of {len(maps)}" * (len(maps) > len(shown))
    title = f"{plain(name)}, step {step}{calls}, sample {sample}: {len(shown)}{of} channels of {height} x {width}"
    figure.suptitle(title, fontsize=9, x=0.01, y=0.99, ha="left", va="top")
    return figure


def _rule(session: Any) -> str:
    """Return the only `capture` rule."""
    ids = [one.id for one in session.plan.rules.rules if one.role == "capture"]
    if not ids:
        raise RecordError(
            'no rule keeps tensors: add one, such as {id: maps, action: capture, modules: "layer4", tensor: output}'
        )
    if len(ids) > 1:
        raise ValueError(f"several rules keep tensors: pass rule= one of {', '.join(ids)}")
    return str(ids[0])


def _kept(
    session: Any, rule: str, name: Name | None, step: int | None, call: int | None
) -> tuple[tuple[str, int, int], Tensor]:
    """Return the newest tensor that a rule has kept of a name, step and call, and its own.

    Raises:
        KeyError: no `capture` rule has this id, or no tensor this name.
        RecordError: nothing was kept, or nothing of this step or call.
        ValueError: there are several tensors to choose from.
    """
    kept = session.captured(rule)
    manifest = session.plan.manifest
    named: tuple[Module | Param, ...] = (*manifest.modules, *manifest.params)
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


def _sample(name: str, tensor: Tensor, sample: int) -> Floats:
    """Return the channels of one sample; of complex elements the magnitudes."""
    from gradsurgeon import _dist  # noqa: PLC0415 # needs torch, as only captures do

    if _dist.is_sharded(tensor):
        raise RecordError(
            f"{name} is divided over ranks (a DTensor), and one rank has only a part to draw: session.captured has it"
        )
    if tensor.dim() != _IMAGES:
        raise ValueError(
            f"{name} has the shape {list(tensor.shape)}, and feature maps have (N, C, H, W): capture a module that "
            "returns such, and choose it by name="
        )
    if not 0 <= sample < len(tensor):
        raise ValueError(f"sample {sample} of {name} is not there: there are {len(tensor)}, from 0")
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    numbers = dense.abs() if dense.is_complex() else dense
    maps: Floats = numbers[sample].cpu().double().numpy()
    return maps


def _normalised(channel: Floats) -> Floats:
    """Return a channel with its least finite element at 0 and its largest at 1; a constant channel at 0."""
    finite = channel[np.isfinite(channel)]
    low, high = finite.min(initial=np.inf), finite.max(initial=-np.inf)
    shown: Floats = (channel - low) / (high - low if high > low else 1.0)
    return shown
