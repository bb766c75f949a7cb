"""Writes a failed step as a directory, as a whole or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon import _bounded_load, _torch
from gradsurgeon.diagnosis import Diagnosis
from gradsurgeon.forensics.bundle_reading import (
    CALL_PARTS,
    FORMAT,
    MOST_BYTES,
    STEP,
    STEP_NAMES,
    STEP_NUMBERS,
    code_of,
)
from gradsurgeon.forensics.kept_step import FailedStep, HostRandom, KeptCall
from gradsurgeon.schema import VERSION
from gradsurgeon.tensors.structure import Path as TensorPath
from gradsurgeon.tensors.structure import tensors_in

# Larger weights are left out; a replay then uses the weights of the model that it is given.
MAX_BYTES = 4 * 2**30
_FACE = "step.json"
_PLAIN = (str, int, bool, float, type(None), torch.dtype, torch.Size)
_HOLDS = "which a bundle cannot hold: it can hold tensors, numbers, texts, dtypes, lists, tuples and dicts"


class NotWrittenError(Exception):
    """The step holds a value that a bundle cannot hold."""


def with_bundle(diagnosis: Diagnosis, failed: FailedStep, folder: Path) -> Diagnosis:
    """Write a bundle into a folder; return the diagnosis with its path, or with the reason why there is none."""
    innocent = failed.together and not diagnosis.where
    if not failed.calls or innocent:
        return diagnosis
    try:
        return replace(diagnosis, bundle=str(write(failed, diagnosis, folder)))
    except Exception as error:  # noqa: BLE001 # whatever a disk or a tensor raises: the diagnosis stays
        why = str(error).partition("\n")[0] or type(error).__name__
    return replace(diagnosis, no_bundle=why)


def write(failed: FailedStep, diagnosis: Diagnosis, folder: Path) -> Path:
    """Write a bundle into a folder under a new name; return its path. After an error there is no part of it.

    Raises:
        NotWrittenError: the model was given a value that cannot be written.
        OSError: the folder cannot be written, or is full.
    """
    document = _document(failed)
    face = _face(failed, document, diagnosis)
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".trap-", dir=folder))
    try:
        (made / _FACE).write_text(json.dumps(face, indent=1), encoding="utf-8")
        torch.save(document, made / STEP)
        try:
            _bounded_load.check(made / STEP, MOST_BYTES)
        except _bounded_load.RefusedError as error:
            raise NotWrittenError(f"no replay would read it: {error}") from error
        # `mkdtemp` lets nobody else read.
        made.chmod(folder.stat().st_mode & 0o777)
        return _named(made, folder, f"trap-step{failed.step}-rank{failed.rank}")
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _named(made: Path, folder: Path, name: str) -> Path:
    """Give a directory its name, or the next one that is free: a bundle is never overwritten."""
    place, number = folder / name, 1
    while place.exists():
        number += 1
        place = folder / f"{name}-{number}"
    return made.rename(place)


def _document(failed: FailedStep) -> dict[str, Any]:
    plain = _Plain()
    modules = {call.name: module for call in failed.calls if (module := call.module()) is not None}
    first = next((param for module in modules.values() for param in module.parameters()), None)
    return {
        "format": FORMAT,
        "gradsurgeon": VERSION,
        "torch": str(torch.__version__),
        "device": "cpu" if first is None else first.device.type,
        "scale": None if failed.scale is None else float(failed.scale),
        "losses": {
            number: (
                plain(loss.value),
                [(node.name, plain(node.saved), node.made_of) for node in loss.nodes],
            )
            for number, loss in failed.losses.items()
        },
        "calls": [_call(call, plain) for call in failed.calls],
        "weights": _weights(modules, plain),
        "code": {name: code_of(module) for name, module in modules.items()},
        **{name: getattr(failed, name) for name in (*STEP_NUMBERS, *STEP_NAMES)},
    }


def _call(call: KeptCall, plain: _Plain) -> dict[str, Any]:
    module = call.module()
    named = [] if module is None else module.named_modules()
    given = {path: _torch.writes(t) for path, t in tensors_in([call.args, call.kwargs])}
    return {
        "name": call.name,
        **{part: plain(getattr(call, part)) for part in CALL_PARTS},
        "random": plain(call.random),
        "host": _host(call.host),
        "autocast": call.autocast,
        "outputs": {
            path: (kept.shape, plain(kept.sample), kept.is_overwritten)
            for path, kept in call.outputs.items()
        },
        "written": call.written != given,
        "casts": {name: tuple(cast) for name, cast in call.casts.items()},
        "training": {name: inner.training for name, inner in named},
    }


def _host(state: HostRandom) -> tuple[Any, Any]:
    """Return the random state of Python and numpy without arrays; other generators than numpy's default are left out."""
    if state.numpy is None or state.numpy["bit_generator"] != "MT19937":
        return state.python, None
    inner = state.numpy["state"]
    return state.python, {**state.numpy, "state": {**inner, "key": inner["key"].tolist()}}


def _weights(modules: Mapping[str, nn.Module], plain: _Plain) -> dict[str, dict[str, Any]] | None:
    """Return weights and buffers by called module and name; ``None`` if they are too large."""
    found = {
        name: dict((*module.named_parameters(), *module.named_buffers()))
        for name, module in modules.items()
    }
    size = sum(t.numel() * t.element_size() for named in found.values() for t in named.values())
    return None if size > MAX_BYTES else {name: plain(named) for name, named in found.items()}


class _Plain:
    """Makes plain values of structures: tensors on the host, the same one for the same tensor."""

    def __init__(self) -> None:
        # With the tensor itself, so that no other one gets its number.
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in (list, tuple):
            return type(value)(self(item) for item in value)
        if type(value) in (dict, OrderedDict):
            return {self(key): self(item) for key, item in value.items()}
        if type(value) not in _PLAIN:
            raise _not_held(f"value of the type {_kind(value)}")
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            raise _not_held(f"tensor of the kind {_kind(tensor)}")
        if id(tensor) not in self._tensors:
            part = tensor.detach().resolve_conj().resolve_neg().cpu()
            # A file has whole storages: nothing of a large one that a small tensor is a part of.
            if not part.nbytes <= part.untyped_storage().nbytes() <= 2 * part.nbytes:
                part = part.clone(memory_format=torch.contiguous_format)
            part = part.detach().requires_grad_(tensor.requires_grad)
            self._tensors[id(tensor)] = tensor, part
        return self._tensors[id(tensor)][1]


def _not_held(what: str) -> NotWrittenError:
    return NotWrittenError(f"the model was given a {what}, {_HOLDS}")


def _kind(value: object) -> str:
    if isinstance(value, Tensor) and type(value) is Tensor:
        return str(value.layout).removeprefix("torch.")
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _face(failed: FailedStep, document: Mapping[str, Any], diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the part of a bundle that people read, and no replay."""
    told = ("format", "gradsurgeon", "torch", "device", "step", "rank", "scale", "bad", "rested")
    return {
        **{key: document[key] for key in told},
        "diagnosis": str(diagnosis).splitlines(),
        "calls": [
            {call.name: _forms(tensors_in([call.args, call.kwargs]))} for call in failed.calls
        ],
        "weights": _forms(tensors_in(document["weights"])),
    }


def _forms(tensors: Iterable[tuple[TensorPath, Tensor]]) -> list[str]:
    return [
        f"{'.'.join(map(str, path))}: {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for path, tensor in tensors
    ]
