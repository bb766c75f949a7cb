"""Pictures of tensors that `capture` rules have kept: how their elements lie, feature maps, Grad-CAM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from numpy.typing import NDArray

from gradsurgeon.report import plots
from gradsurgeon.report.captures import Calls, Capture, pair, several, single
from gradsurgeon.report.names import Name, Session
from gradsurgeon.report.picture import NONFINITE, Picture, plain
from gradsurgeon.tensors.saliency import grad_cam, resized

if TYPE_CHECKING:
    from torch import Tensor

    from gradsurgeon.store import RecordQueries

_CHANNELS, _PER_ROW = 64, 8
_TENSORS, _BINS = 10, 80
_IMAGES, _IMAGE = 4, 3  # dimensions of several images, and of one

Floats = NDArray[np.float64]


def histogram(
    source: RecordQueries,
    *,
    name: Name | None = None,
    rule: str | None = None,
    step: int | None = None,
    call: int | None = None,
) -> Picture:
    """Draw the elements of tensors that a `capture` rule has kept, or the norms of all parameters."""
    session = cast("Session", source) if hasattr(source, "captured") else None
    ids = (
        []
        if session is None
        else [one.id for one in session.plan.rules.rules if one.role == "capture"]
    )
    if session is not None and rule in ids:
        return _elements(several(session, rule, name, step, call))
    if step is not None or call is not None:
        raise ValueError(
            "step= and call= choose among the tensors that a capture rule has kept: pass rule= one of "
            f"{', '.join(ids) or 'these, of which there are none here'}"
        )
    return plots.density(source, name=name, rule=rule)


def _elements(captures: Sequence[Capture]) -> Picture:
    numbers = [one.numbers().flatten().numpy() for one in captures[:_TENSORS]]
    finite = [one[np.isfinite(one)] for one in numbers]
    filled = [one for one in finite if one.size]
    ends = (0.0, 1.0)
    if filled := [one for one in finite if one.size]:
        ends = min(one.min() for one in filled), max(one.max() for one in filled)
    figure = Picture(11, 4.8)
    axes = figure.subplots()
    for number, (one, every, there) in enumerate(zip(captures, numbers, finite, strict=False)):
        counts, edges = np.histogram(there, bins=_BINS, range=ends)
        bad = every.size - there.size
        text = plain(str(one)) + (f" ({bad:,} of {every.size:,} not finite)" if bad else "")
        axes.stairs(counts, edges, label=text, color=f"C{number}", linewidth=1.2)
    axes.set_yscale("log")
    axes.set_ylabel("elements")
    axes.set_xlabel("value")
    shown = f": {len(numbers)} of {len(captures):,} tensors" * (len(captures) > len(numbers))
    axes.set_title(f"elements kept by {captures[0].rule}{shown}", loc="left", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def features(
    source: Session,
    *,
    name: Name | None = None,
    rule: str | None = None,
    step: int | None = None,
    call: int | None = None,
    sample: int = 0,
) -> Picture:
    """Draw the channels of one sample of a tensor of shape (N, C, H, W), each from its least to its largest."""
    found = single(source, rule, name, step, call)
    maps = _of_sample(found, found.numbers(), sample).numpy()
    shown = maps[:_CHANNELS]
    columns = min(_PER_ROW, len(shown))
    rows = -(-len(shown) // columns)
    height, width = maps.shape[1:]
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
    of = f" of {len(maps)}" * (len(maps) > len(shown))
    title = f"{plain(str(found))}, sample {sample}: {len(shown)}{of} channels of {height} x {width}"
    figure.suptitle(title, fontsize=9, x=0.01, y=0.99, ha="left", va="top")
    return figure


def cam(
    source: Session,
    *,
    name: Name | None = None,
    rule: str | Sequence[str] | None = None,
    step: int | None = None,
    call: Calls | None = None,
    sample: int = 0,
    image: Tensor | None = None,
) -> Picture:
    """Draw the Grad-CAM of a module, over the image that it was given if that is at hand."""
    output, gradient = pair(source, rule, name, step, call)
    maps = _of_sample(output, output.numbers(), sample)
    heat = grad_cam(maps[None], _of_sample(gradient, gradient.numbers(), sample)[None])[0]
    title = f"Grad-CAM of {plain(str(output))}, sample {sample}" + ": 0 everywhere" * (
        not heat.any()
    )
    figure = Picture(5.5 if image is None else 9.0, 4.6)
    axes = figure.subplots(1, 1 if image is None else 2, squeeze=False)[0]
    if image is not None:
        picture = _picture(image, sample)
        heat = resized(heat, picture.shape[0], picture.shape[1])
        for one in axes:
            one.imshow(picture, cmap="gray", vmin=0, vmax=1)
    shown = np.ma.masked_invalid(heat.numpy())
    top = float(shown.max()) if heat.any() else 1.0
    # Where the map says nothing the image shows through.
    alpha = None if image is None else np.clip(0.75 * shown.filled(0.0) / top, 0, 1)
    cast("Any", axes[-1]).imshow(shown, vmin=0, vmax=top, cmap="turbo", alpha=alpha)
    colours = ScalarMappable(Normalize(0, top), "turbo")
    figure.colorbar(colours, ax=axes[-1], shrink=0.8)
    for one in axes:
        one.set_axis_off()
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def _of_sample(capture: Capture, numbers: Tensor, sample: int) -> Tensor:
    if numbers.dim() != _IMAGES:
        raise ValueError(
            f"{capture.name} has the shape {list(numbers.shape)}, and feature maps have (N, C, H, W): capture a "
            "module that returns such, and choose it by name="
        )
    if not 0 <= sample < len(numbers):
        raise ValueError(
            f"sample {sample} of {capture.name} is not there: there are {len(numbers)}, from 0"
        )
    return numbers[sample]


def _normalised(channel: Floats) -> Floats:
    """Return a channel with its least finite element at 0 and its largest at 1; what is constant at 0."""
    finite = channel[np.isfinite(channel)]
    low, high = finite.min(initial=np.inf), finite.max(initial=-np.inf)
    return (
        (channel - low) / (high - low)
        if high > low
        else np.where(np.isfinite(channel), 0.0, channel)
    )


def _picture(image: Tensor, sample: int) -> Floats:
    """Return an image as matplotlib takes it: height, width and colours, between 0 and 1."""
    one = image[sample] if image.dim() == _IMAGES and sample < len(image) else image
    if one.dim() != _IMAGE or one.shape[0] not in (1, 3):
        raise ValueError(
            "image= takes a tensor of shape (C, H, W), or (N, C, H, W) of which the sample is taken, with "
            f"1 or 3 channels, found {list(image.shape)}"
        )
    # What was made to have mean 0 and deviation 1 for the model is no colour any more.
    shown: Floats = _normalised(one.detach().cpu().double().permute(1, 2, 0).numpy())
    return shown
