"""Previews of captured tensors for the run directory: numbers and small maps. The tensors may be gigabytes."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradsurgeon import _dist
from gradsurgeon.actions import Rule, gradient_pairs
from gradsurgeon.errors import printable
from gradsurgeon.store.layout import clean
from gradsurgeon.tensors.saliency import grad_cam

CaptureKey = tuple[str, int, int]
Kept = Mapping[CaptureKey, Tensor]

_TENSORS, _BINS = 24, 60
_CHANNELS, _SIDE = 16, 48
_SAMPLES, _CAM_SIDE = 4, 64
# All maps of a rank together, at one byte per pixel.
_BYTES = 400_000
_TOP, _NONFINITE = 254, 255
_IMAGE, _IMAGES = 3, 4  # dimensions of the maps of one image, and of a batch of images
# So many elements at a time become float64, so that they stay in the cache.
_CHUNK = 2**18
_LONGEST_REASON = 200


@torch.no_grad()
def previews(rules: Mapping[str, Rule], of: Callable[[str], Kept]) -> list[dict[str, Any]]:
    """Return previews of the tensors that rules have kept, for `store.captures`. Waits for the device.

    No other rank takes part. A tensor that cannot be shown has a note with the reason.
    """
    refs = {id_: rule.ref for id_, rule in rules.items() if rule.target != "params"}
    partners = dict(gradient_pairs(refs))
    room = _BYTES // max(1, len(rules))
    return [
        _of_rule(rule, of(rule), of(partners[rule]) if rule in partners else {}, room)
        for rule in rules
    ]


def _of_rule(rule: str, kept: Kept, gradients: Kept, room: int) -> dict[str, Any]:
    newest = {name: (name, step, call) for name, step, call in kept}
    shown = []
    for key in islice(newest.values(), _TENSORS):
        entry = _entry(key, kept[key])
        drawings = {
            "maps": _attempt(_feature_maps, kept[key]),
            "cam": _attempt(_cam, key[0], kept, gradients),
        }
        for kind, maps in drawings.items():
            size = 0 if maps is None else math.prod(maps["shape"])
            if size > room:
                entry["note"] = "its maps are left out: the maps of other tensors take the room"
            elif maps is not None:
                room -= size
                entry[kind] = maps
        shown.append(entry)
    return {"rule": rule, "more": len(newest) - len(shown), "tensors": shown}


def _attempt(draw: Callable[..., dict[str, Any] | None], *arguments: Any) -> dict[str, Any] | None:
    try:
        return draw(*arguments)
    except Exception:  # noqa: BLE001 # any kind of tensor may come, and the others are shown
        return None


def _entry(key: CaptureKey, tensor: Tensor) -> dict[str, Any]:
    name, step, call = key
    entry = {"name": clean(name), "step": step, "call": call, "dtype": str(tensor.dtype)}
    if _dist.is_sharded(tensor):
        note = "divided over ranks (a DTensor), of which each has only a part: not shown"
        return {**entry, "note": note, "shape": list(tensor.shape)}
    try:
        return {**entry, **_numbers(tensor)}
    except Exception as error:  # noqa: BLE001 # any kind of tensor may come, and the others are shown
        reason = str(error).partition("\n")[0][:_LONGEST_REASON] or type(error).__name__
        return {**entry, "note": f"cannot be shown: {printable(reason)}"}


def _numbers(tensor: Tensor) -> dict[str, Any]:
    """Return shape, range, mean and histogram of the finite elements, and the number of non-finite elements."""
    elements = _elements(tensor)
    count, total, low, high = 0, 0.0, math.inf, -math.inf
    for part in _finite(elements):
        least, largest = (end.item() for end in part.aminmax())
        low, high = min(low, least), max(high, largest)
        count, total = count + len(part), total + part.sum().item()
    found: dict[str, Any] = {
        "shape": list(map(int, tensor.shape)),
        "elements": len(elements),
        "nonfinite": len(elements) - count,
        "note": "complex: of the magnitudes" if tensor.is_complex() else "",
    }
    if not count:
        return found
    counts = [count]
    if 0 < high - low < math.inf:
        parts = (torch.histc(part, _BINS, low, high) for part in _finite(elements))
        counts = [int(number) for number in torch.stack(list(parts)).sum(dim=0).tolist()]
    # The sum of numbers near the end of the range of float64 overflows.
    mean = total / count if math.isfinite(total) else None
    return {**found, "low": low, "high": high, "mean": mean, "counts": counts}


def _elements(tensor: Tensor) -> Tensor:
    """Return all elements in one dimension and in any order, without a copy if possible."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError("it is sparse or quantized")
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).reshape(-1)


def _finite(elements: Tensor) -> Iterator[Tensor]:
    for part in torch.split(elements, _CHUNK):
        numbers = _doubles(part)
        if len(finite := numbers[numbers.isfinite()]):
            yield finite


def _doubles(tensor: Tensor) -> Tensor:
    # Other devices may lack float64.
    here = tensor if tensor.device.type in ("cpu", "cuda") else tensor.cpu()
    return here.to(torch.complex128).abs() if here.is_complex() else here.double()


def _feature_maps(tensor: Tensor) -> dict[str, Any] | None:
    """Return the first channels of the first sample, ``None`` unless the tensor has the shape of feature maps."""
    shape = tensor.shape
    if len(shape) not in (_IMAGE, _IMAGES) or 0 in shape or 1 in shape[-2:]:
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized or _dist.is_sharded(tensor):
        return None
    maps = tensor[0] if len(shape) == _IMAGES else tensor
    return _codes(maps[:_CHANNELS], _SIDE)


def _cam(name: str, values: Kept, gradients: Kept) -> dict[str, Any] | None:
    """Return the Grad-CAM of the first samples in the newest step in which the module ran once."""
    steps = {key[1] for key in values if key[0] == name}
    steps &= {key[1] for key in gradients if key[0] == name}
    for step in sorted(steps, reverse=True):
        maps, slopes = (
            [tensor for key, tensor in kept.items() if key[:2] == (name, step)]
            for kept in (values, gradients)
        )
        if len(maps) == len(slopes) == 1 and not _dist.any_sharded([*maps, *slopes]):
            # One sample at a time: `grad_cam` converts all its arguments to float64.
            samples = zip(
                *(torch.split(one[:_SAMPLES], 1) for one in (*maps, *slopes)), strict=True
            )
            heat = torch.cat([grad_cam(*pair) for pair in samples])
            # The gradient of the loss is small for a confident sample, so only proportions mean anything.
            tops = heat.nan_to_num(posinf=0.0).amax(dim=(1, 2), keepdim=True)
            return {"step": step, **_codes(heat / tops.where(tops > 0, 1.0), _CAM_SIDE)}
    return None


def _codes(maps: Tensor, side: int) -> dict[str, Any]:
    """Return averaged maps of shape (C, H, W), with no side longer than given, as codes from 0 (lowest) to 254."""
    # Much larger maps are thinned out first, so that little leaves the device.
    stride = max(1, max(maps.shape[1:]) // (4 * side))
    numbers = _doubles(maps[:, ::stride, ::stride].cpu())
    factor = min(1.0, side / max(numbers.shape[1:]))
    height, width = (max(1, round(length * factor)) for length in numbers.shape[1:])
    small = functional.adaptive_avg_pool2d(numbers, (height, width))
    is_finite = small.isfinite()
    finite = small[is_finite]
    low, high = (finite.min().item(), finite.max().item()) if len(finite) else (0.0, 0.0)
    shares = (small - low) / (high - low) if 0 < high - low < math.inf else small * 0
    codes = (shares * _TOP).round().masked_fill(~is_finite, _NONFINITE).to(torch.uint8)
    data = b64encode(bytes(codes.flatten().tolist())).decode("ascii")
    return {"shape": list(small.shape), "low": low, "high": high, "codes": data}
