"""The way to the pictures. Needs no matplotlib before it draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradsurgeon.common._libraries import library
from gradsurgeon.errors import RecordError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

# Pictures that there are no longer, each with what is on the page instead.
_GONE = {"heatmap": "the map of norms is", "histograms": "the bands of histograms are"}
_IMAGES = 4  # dimensions of several images


def check(kind: str, known: Sequence[str]) -> None:
    """Raise `ValueError` if there is no such picture here."""
    if kind in _GONE:
        page = "on the page of `gradsurgeon report RUN --html FILE`"
        raise ValueError(f"the picture {kind!r} is gone: {_GONE[kind]} {page}")
    if kind not in known:
        raise ValueError(f"no picture {kind!r} here; there are {', '.join(known)}")


def features(
    kept: dict[tuple[str, int, int], Tensor],
    *,
    rule: str,
    name: str | Sequence[str] | None,
    step: int | None,
    call: int | None,
    sample: int,
) -> Figure:
    """Draw the channels of one sample of a captured tensor of shape (N, C, H, W), each from its least to its largest."""
    plots = drawing()
    if not kept:
        raise RecordError(f"rule {rule} has kept nothing yet: see `session.captured({rule!r})`")
    names = {key[0] for key in kept}
    if name is not None:
        names = plots.matching(name, names, {})
    if len(names) > 1:
        raise ValueError(
            f"rule {rule} has kept {len(names):,} tensors: pass name=, such as {min(names)}"
        )
    fitting = [
        key for key in kept if key[0] in names and step in (None, key[1]) and call in (None, key[2])
    ]
    if not fitting:
        raise RecordError(
            f"rule {rule} has kept nothing of step={step}, call={call}: see `session.captured({rule!r})`"
        )
    last = max(fitting)
    maps = _channels(last[0], kept[last], sample)
    figure: Figure = plots.features(maps, last, sample)
    return figure


def drawing() -> Any:
    """Return the module that draws, which needs numpy and matplotlib."""
    for name in ("numpy", "matplotlib"):
        library(name, "plot", "drawing")
    from gradsurgeon.report import plots  # noqa: PLC0415 # needs matplotlib

    return plots


def _channels(name: str, tensor: Tensor, sample: int) -> Tensor:
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
    if dense.is_complex():
        dense = dense.abs()
    return dense[sample].cpu().double()
