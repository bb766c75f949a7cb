"""Pictures of tensors that `capture` rules have kept: feature maps and Grad-CAM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from gradsurgeon.actions import CaptureRule, gradient_pairs
from gradsurgeon.errors import RecordError
from gradsurgeon.planning import Module, Param
from gradsurgeon.report.names import Name, Session, matching
from gradsurgeon.report.plots import NONFINITE, Picture, plain
from gradsurgeon.report.spikes import Floats
from gradsurgeon.tensors.saliency import grad_cam, resized

if TYPE_CHECKING:
    from torch import Tensor

_CHANNELS, _PER_ROW = 64, 8
_IMAGES, _IMAGE = 4, 3  # dimensions of several images, and of one
_LISTED = 8
_ADD = '{id: maps, action: capture, modules: "layer4", tensor: output}'
_ADD_GRADIENT = '{id: map-gradients, action: capture, modules: "layer4", tensor: output.grad}'


class Capture(NamedTuple):
    """A tensor that a rule has kept, on whichever device it was."""

    rule: str
    name: str
    step: int
    call: int
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.name}, step {self.step}" + f", call {self.call}" * bool(self.call)

    def sample(self, sample: int) -> Tensor:
        """Return the channels of one sample as float64 on the CPU; of complex elements the magnitudes.

        Raises:
            RecordError: the tensor is divided over ranks.
            ValueError: it does not have the shape (N, C, H, W), or not so many samples.
        """
        from gradsurgeon import _dist  # noqa: PLC0415 # needs torch, as only captures do

        if _dist.is_sharded(self.tensor):
            raise RecordError(
                f"{self.name} is divided over ranks (a DTensor), and one rank has only a part to draw: "
                f"session.captured({self.rule!r}) has it"
            )
        if self.tensor.dim() != _IMAGES:
            raise ValueError(
                f"{self.name} has the shape {list(self.tensor.shape)}, and feature maps have (N, C, H, W): capture "
                "a module that returns such, and choose it by name="
            )
        if not 0 <= sample < len(self.tensor):
            raise ValueError(
                f"sample {sample} of {self.name} is not there: there are {len(self.tensor)}, from 0"
            )
        dense = self.tensor.to_dense() if self.tensor.is_sparse else self.tensor
        return (dense.abs() if dense.is_complex() else dense)[sample].cpu().double()


# A capture alone, or an output with its gradient.
Candidate = tuple[Capture, ...]


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
    ids = [one.id for one in _rules(source)]
    if rule is None and not ids:
        raise RecordError(f"no rule keeps tensors: add one, such as {_ADD}")
    rules = [one for one in ids if source.captured(one)] or ids[:1] if rule is None else [rule]
    if len(rules) > 1:
        raise ValueError(f"several rules have kept tensors: pass rule= one of {_listed(rules)}")
    kept = _kept(source, rules[0])
    if not kept:
        raise RecordError(
            f"rule {rules[0]} has kept nothing yet: it does when the tensor next passes, in a step in which it is due"
        )
    calls = _of_step(_named(source, [(one,) for one in kept], name), step)
    found = (calls if call is None else _narrowed(calls, "call", (call,)))[-1][0]
    maps = found.sample(sample).numpy()
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
    call: int | tuple[int, int] | None = None,
    sample: int = 0,
    image: Tensor | None = None,
) -> Picture:
    """Draw the Grad-CAM of a module, over the image that it was given if that is at hand."""
    output, gradient = _pair(source, rule, name, step, call)
    heat = grad_cam(output.sample(sample)[None], gradient.sample(sample)[None])[0]
    nothing = ": 0 everywhere" * (not heat.any())
    figure = Picture(5.5 if image is None else 9.0, 4.6)
    panels = figure.subplots(1, 1 if image is None else 2, squeeze=False)[0]
    if image is not None:
        picture = _picture(image, sample)
        heat = resized(heat, picture.shape[0], picture.shape[1])
        for axes in panels:
            axes.imshow(picture, cmap="gray", vmin=0, vmax=1)
    shown = np.ma.masked_invalid(heat.numpy())
    top = float(shown.max()) if heat.any() else 1.0
    # Where the map says nothing the image shows through.
    alpha = None if image is None else np.clip(0.75 * shown.filled(0.0) / top, 0, 1)
    cast("Any", panels[-1]).imshow(shown, vmin=0, vmax=top, cmap="turbo", alpha=alpha)
    figure.colorbar(ScalarMappable(Normalize(0, top), "turbo"), ax=panels[-1], shrink=0.8)
    for axes in panels:
        axes.set_axis_off()
    title = f"Grad-CAM of {plain(str(output))}, sample {sample}{nothing}"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def _pair(
    session: Session,
    rule: str | Sequence[str] | None,
    name: Name | None,
    step: int | None,
    call: int | tuple[int, int] | None,
) -> Candidate:
    """Return what a module returned, and the gradient of that, of one step.

    Raises:
        KeyError: no tensor has this name.
        RecordError: no two rules have kept both, or not of this step or call.
        ValueError: there are several to choose from.
    """
    given = {rule} if isinstance(rule, str) else set(rule or ())
    refs = {one.id: one.ref for one in _rules(session) if one.target != "params"}
    rules = [pair for pair in gradient_pairs(refs) if given <= {*pair}]
    if not rules:
        found = _listed(f"{one} ({ref})" for one, ref in refs.items())
        raise RecordError(
            "Grad-CAM takes two capture rules on one module, of its output and of the gradient of that, "
            f"such as {_ADD} and {_ADD_GRADIENT}; there are: {found or 'none'}"
        )
    pairs: list[Candidate] = [
        (output, gradient)
        for first, second in rules
        for output in _kept(session, first)
        for gradient in _kept(session, second)
        if (output.name, output.step) == (gradient.name, gradient.step)
    ]
    if not pairs:
        kept = {one: _listed(map(str, _kept(session, one))) for pair in rules for one in pair}
        listed = "; ".join(f"{one}: {tensors or 'nothing'}" for one, tensors in kept.items())
        raise RecordError(
            "the output and its gradient have been kept of no module in one step: both come with a forward pass "
            f"and `backward`; kept by {listed}"
        )
    pairs = _of_step(_named(session, pairs, name), step)
    if call is not None:
        pairs = _narrowed(pairs, "call", call if isinstance(call, tuple) else (call, call))
    if len(by := {tuple(one.rule for one in pair) for pair in pairs}) > 1:
        kept_name = pairs[0][0].name
        raise ValueError(
            f"several rules have kept {kept_name}: pass rule= one of {_listed(sorted(by))}"
        )
    if len(pairs) > 1:
        outputs, gradients = (len({one.call for one in side}) for side in zip(*pairs, strict=True))
        raise ValueError(
            f"{pairs[0][0].name} has {outputs} outputs and {gradients} gradients in step {pairs[0][0].step}, and "
            "which belong together cannot be known: pass call=, a number where each backward pass came right "
            "after its forward pass, or call=(output, gradient): in one backward pass the last call of a "
            "module comes first"
        )
    return pairs[0]


def _named(session: Session, candidates: Sequence[Candidate], name: Name | None) -> list[Candidate]:
    """Return the candidates of the one tensor that is meant."""
    found = dict.fromkeys(one[0].name for one in candidates)
    manifest = session.plan.manifest
    named: tuple[Module | Param, ...] = (*manifest.modules, *manifest.params)
    aliases = {alias: one.name for one in named for alias in one.aliases}
    names = list(found) if name is None else matching(name, found, aliases)
    if len(names) > 1:
        raise ValueError(f"several tensors were kept: pass name= one of {_listed(names)}")
    return [one for one in candidates if one[0].name == names[0]]


def _of_step(candidates: Sequence[Candidate], step: int | None) -> list[Candidate]:
    newest = max(one[0].step for one in candidates) if step is None else step
    return _narrowed(candidates, "step", (newest,) * len(candidates[0]))


def _narrowed(
    candidates: Sequence[Candidate], what: str, wanted: tuple[int, ...]
) -> list[Candidate]:
    """Return the candidates of a step or of a call, or say which there are."""
    having = [(one, tuple(getattr(part, what) for part in one)) for one in candidates]
    if found := [one for one, values in having if values == wanted]:
        return found
    rules = " and ".join(dict.fromkeys(part.rule for one in candidates for part in one))
    there = dict.fromkeys(values if len({*values}) > 1 else values[0] for _, values in having)
    asked = wanted if len({*wanted}) > 1 else wanted[0]
    raise RecordError(
        f"{rules} kept {candidates[0][0].name} of {what} {_listed(there)}, not of {what} {asked}"
    )


def _rules(session: Session) -> list[CaptureRule]:
    return [one for one in session.plan.rules.rules if isinstance(one, CaptureRule)]


def _kept(session: Session, rule: str) -> list[Capture]:
    return [Capture(rule, *key, tensor) for key, tensor in session.captured(rule).items()]


def _listed(items: Iterable[object]) -> str:
    texts = list(map(str, items))
    more = f", and {len(texts) - _LISTED:,} more" if len(texts) > _LISTED else ""
    return ", ".join(texts[:_LISTED]) + more


def _normalised(channel: Floats) -> Floats:
    """Return a channel with its least finite element at 0 and its largest at 1; a constant channel at 0."""
    finite = channel[np.isfinite(channel)]
    low, high = finite.min(initial=np.inf), finite.max(initial=-np.inf)
    return (channel - low) / (high - low if high > low else 1.0)


def _picture(image: Tensor, sample: int) -> Floats:
    """Return an image as matplotlib takes it: height, width and colours, between 0 and 1."""
    one = image[sample] if image.dim() == _IMAGES and sample < len(image) else image
    if one.dim() != _IMAGE or one.shape[0] not in (1, 3):
        raise ValueError(
            "image= takes a tensor of shape (C, H, W), or (N, C, H, W) of which the sample is taken, with "
            f"1 or 3 channels, found {list(image.shape)}"
        )
    # What was made to have mean 0 and deviation 1 for the model is no colour any more.
    colours: Floats = one.detach().cpu().double().permute(1, 2, 0).numpy()
    return _normalised(colours)
