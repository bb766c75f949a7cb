"""Asks a kept call what its training does not show: do samples mix, does evaluation repeat itself, which inputs count."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from gradsurgeon.errors import shorten_names
from gradsurgeon.forensics.kept_step import KeptCall, KeptLoss
from gradsurgeon.forensics.operations import ModuleCalls, name_of
from gradsurgeon.forensics.replay import replay, with_samples
from gradsurgeon.forensics.undisturbed import RandomState
from gradsurgeon.language.planning import ROOT
from gradsurgeon.tensors.structure import tensors_in

FOUND = "found: "
# A model that is sure of wrong classes has so many times the loss of one that guesses.
_SURE = 2
_DROPOUTS = ("aten.native_dropout", "aten.bernoulli_")
_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
_NOT_REPEATED = "samples, inputs: not asked, because a second call with the same input and random state differs, first in {}"
_NO_BATCH = "samples: not asked, because no dimension is certain to have different samples that do not refer to each other"
_APART = (
    "samples: the {} of the batch do not mix",
    "samples: the {} along dimension 1 do not mix, what lies along dimension 0 does: right if samples lie along dimension 1, "
    "else look for a missing `batch_first=True`",
)
_BY_NORM = "samples: the {} of the batch mix in {}, as batch norm does, and nowhere else"
_MIX = FOUND + (
    "samples: the {} of the batch mix: with half of them replaced, the outputs of others change, first in {}. Look there "
    "for a softmax, mean, norm or view over the dimension of samples, or a missing `batch_first=True`; it is no fault where "
    "it is meant"
)
_REPEATS = "evaluation: two calls in evaluation mode are equal"
_DROPS = FOUND + (
    "evaluation: two calls in evaluation mode differ, first in {}, because a dropout is on. Pass `training=self.training` to "
    "a functional dropout, or use `nn.Dropout`"
)
_DRAWS = "evaluation: two calls in evaluation mode differ, first in {}, and no dropout is on: the model samples, or keeps a state"
_COUNTS = "inputs: {} changes the outputs when samples exchange it"
_IDLE = FOUND + (
    "inputs: {} changes no output when samples exchange it. Look whether the model reads it, and whether it is multiplied by 0"
)
_LOSS = "first loss: {:.3g}, and the log of the {} classes is {:.3g}"
_HIGH = ": the model is sure of wrong classes. Scale down its inputs, or the first weights of its last layer"


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types there
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(name_of(func))
        return func(*args, **(kwargs or {}))


def answers(call: KeptCall, module: nn.Module, loss: KeptLoss | None) -> Iterator[str]:
    """Answer each question by further calls of a module, which work on copies and put back what they change."""
    weights = {}
    for name, param in module.named_parameters():
        # A layer that begins at 0 hides what comes before it.
        ramp = torch.linspace(0, 0.01, param.numel()).view_as(param)
        weights[name] = param + ramp.to(param)
    call = replace(call, weights=weights, grads={})
    place = _change(module, call, call)
    if place:
        yield _NOT_REPEATED.format(place)
    else:
        yield _samples(module, call)
        yield from _effects(module, call)
    yield _evaluation(module, call)
    if loss is not None:
        yield from _first_losses(loss)


def _samples(module: nn.Module, call: KeptCall) -> str:
    shape, _ = next(iter(call.outputs.values()))
    norms = [name for name, inner in module.named_modules() if isinstance(inner, _BatchNorm)]
    calm = replace(call, training=dict.fromkeys(norms, False))
    texts: list[str] = []
    for size in shape[:2]:
        if size == 1 or not _has_samples(call, size):
            continue
        order = _every_second(size)
        if not _change(module, call, with_samples(call, order), size):
            return _APART[len(texts)].format(size)
        # The place is that beside batch norms, which mix samples as well.
        place = _change(module, calm, with_samples(calm, order), size)
        if place:
            texts.append(_MIX.format(size, place))
        else:
            texts.append(_BY_NORM.format(size, shorten_names(norms)))
    return next(iter(texts), _NO_BATCH)


def _has_samples(call: KeptCall, size: int) -> bool:
    """Tell whether an input has so many samples, and none may relate samples to each other."""
    sizes: set[int] = set()
    for tensor in call.inputs.values():
        shape = [*tensor.shape]
        are_edges = shape[:1] == [2] and not tensor.is_floating_point()
        if are_edges or tensor.is_sparse or shape == [size, size]:
            return False
        sizes.update(shape[:2])
    return size in sizes


def _every_second(size: int) -> list[int]:
    """Return an order in which the first sample is in the place of every second one."""
    return [number * (1 - number % 2) for number in range(size)]


def _effects(module: nn.Module, call: KeptCall) -> Iterator[str]:
    for name, tensor in call.inputs.items():
        # Samples that are alike cannot be exchanged.
        if not tensor.dim() or tensor.is_sparse or not bool((tensor[1::2] != tensor[:1]).any()):
            continue
        other = with_samples(call, _every_second(len(tensor)), tensor)
        text = _IDLE
        # Teacher forcing and dropped conditions leave an input out by chance.
        if _change(module, call, other) or _change(module, _by_chance(call), _by_chance(other)):
            text = _COUNTS
        yield text.format(name)


def _evaluation(module: nn.Module, call: KeptCall) -> str:
    call = replace(call, training=dict.fromkeys(dict(module.named_modules()), False))
    with _Operations() as done:
        place = _change(module, call, _by_chance(call))
    if not place:
        return _REPEATS
    if done.names.isdisjoint(_DROPOUTS):
        return _DRAWS.format(place)
    return _DROPS.format(place)


def _by_chance(call: KeptCall) -> KeptCall:
    return replace(call, random=RandomState.now(call.random.torch))


def _change(module: nn.Module, before: KeptCall, after: KeptCall, size: int = 0) -> str:
    """Return the first module with another output, for samples that stay; nothing if all outputs of the model are equal."""
    seen = []
    for call in (before, after):
        outputs: list[tuple[str, Tensor]] = []
        with ModuleCalls().watched(module, partial(_note, outputs, size)):
            error = replay(call, nullcontext).error
        if error is not None:
            raise error
        seen.append(outputs)
    changed: list[str] = []
    for (name, rows), (_, others) in zip(*seen, strict=False):
        # Kernels round a row alike, whatever the other rows hold.
        if not torch.equal(rows, others):
            changed.append(name)
    if ROOT not in changed:
        return ""
    return changed[0].replace(ROOT, type(module).__name__, changed == [ROOT])


def _note(outputs: list[tuple[str, Tensor]], size: int, name: str, output: Any) -> None:
    for _, tensor in tensors_in(output):
        rows = tensor.detach().clone()
        shape = rows.shape[:2]
        for dim, length in enumerate(shape):
            if length == size:  # both of similarities
                rows = rows.movedim(dim, 0)[::2].movedim(0, dim)
        if size in (0, *shape):
            outputs.append((name, rows))


def _first_losses(loss: KeptLoss) -> Iterator[str]:
    for node in loss.nodes:
        if node.name in _CROSS_ENTROPIES:
            scores = node.saved["self"]
            target = node.saved["target"].clamp(min=0).unsqueeze(1)
            mean = -scores.gather(1, target).mean()
            classes = scores.size(1)
            guess = math.log(classes)
            text = _LOSS.format(mean, classes, guess)
            if mean > _SURE * guess:
                text = FOUND + text + _HIGH
            yield text
