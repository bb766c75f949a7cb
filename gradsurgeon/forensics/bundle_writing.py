"""Writes a failed step as a directory: safetensors and JSON, as a whole or not at all."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon import _torch
from gradsurgeon.diagnosis import Diagnosis
from gradsurgeon.forensics.bundle_reading import FORMAT, JSON, TENSORS, code_of
from gradsurgeon.forensics.kept_step import (
    FailedStep,
    HostRandom,
    KeptCall,
    KeptLoss,
)
from gradsurgeon.schema import VERSION
from gradsurgeon.tensors.structure import tensors_in

# Weights beyond it are left out; a replay takes those of the model that it is given.
MAX_BYTES = 4 * 2**30
_DEEPEST = 64
_PLAIN = (str, int, bool, type(None))
_HOLDS = "which a bundle cannot hold: it can hold tensors, numbers, texts, lists, tuples and dicts"


@dataclass(slots=True)
class _Tensors:
    """Tensors on their way into a file, each once."""

    by_key: dict[str, Tensor] = field(default_factory=dict)
    # With the tensor itself, so that no other one gets its number.
    _keys: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    # What cannot be written.
    lost: list[str] = field(default_factory=list)
    # How many things structures may still hold: one that contains itself has no end.
    left: int = 100_000

    def add(self, tensor: Tensor) -> dict[str, Any]:
        if id(tensor) not in self._keys:
            key = f"t{len(self._keys)}"
            self._keys[id(tensor)] = key, tensor
            # A file holds no two tensors that share memory.
            self.by_key[key] = (
                tensor.detach().resolve_conj().resolve_neg().cpu().clone().contiguous()
            )
        entry: dict[str, Any] = {"tensor": self._keys[id(tensor)][0], "grad": tensor.requires_grad}
        if not tensor.is_contiguous():
            entry["stride"] = list(tensor.stride())
        return entry

    def lose(self, what: str) -> dict[str, str]:
        self.lost.append(what)
        return {"lost": what}


class NotWrittenError(Exception):
    """The step holds what a bundle cannot hold."""


def with_bundle(diagnosis: Diagnosis, failed: FailedStep, folder: Path) -> Diagnosis:
    """Write a bundle into a folder; return the diagnosis with its place, or with the reason why there is none."""
    innocent = failed.together and not diagnosis.where
    if not failed.calls or innocent:
        return diagnosis
    try:
        return replace(diagnosis, bundle=str(write(failed, diagnosis, folder)))
    except ModuleNotFoundError:
        why = "the library safetensors is missing: pip install 'gradsurgeon[bundle]'"
    except Exception as error:  # noqa: BLE001 # whatever a disk or a tensor brings about: the diagnosis stands
        why = str(error).partition("\n")[0] or type(error).__name__
    return replace(diagnosis, no_bundle=why)


def write(failed: FailedStep, diagnosis: Diagnosis, folder: Path) -> Path:
    """Write a bundle into a folder, under a name that nothing has yet; it is there as a whole or not at all.

    Raises:
        NotWrittenError: the model was given something that cannot be written.
        OSError: the folder cannot be written, or is full.
        ModuleNotFoundError: the library safetensors is missing.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 # an extra

    tensors = _Tensors()
    first = next(iter(failed.calls)).module()
    param = None if first is None else next(first.parameters(), None)
    document = {
        "format": FORMAT,
        "gradsurgeon": VERSION,
        "torch": str(torch.__version__),
        "device": "cpu" if param is None else param.device.type,
        "step": failed.step,
        "rank": failed.rank,
        "scale": None if failed.scale is None else float(failed.scale),
        "losses": {str(number): _loss(loss, tensors) for number, loss in failed.losses.items()},
        "modules": failed.modules,
        "rested": failed.rested,
        "bad": failed.bad,
        "passes": failed.passes,
        "dropped": failed.dropped,
        "updated": failed.updated,
        "diagnosis": str(diagnosis),
        "calls": [_call(call, tensors) for call in failed.calls],
        "weights": _weights(failed, tensors),
        "code": {
            call.name: code_of(module)
            for call in failed.calls
            if (module := call.module()) is not None
        },
    }
    if tensors.lost:
        raise NotWrittenError(f"the model was given {tensors.lost[0]}, {_HOLDS}")
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".trap-", dir=folder))
    try:
        save_file(tensors.by_key, made / TENSORS)
        (made / JSON).write_text(json.dumps(document, indent=1), encoding="utf-8")
        # As the folder of the run may be read, and not as files for the time being.
        (made / TENSORS).chmod((made / JSON).stat().st_mode & 0o777)
        made.chmod(folder.stat().st_mode & 0o777)
        return _named(made, folder, f"trap-step{failed.step}-rank{failed.rank}")
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _named(made: Path, folder: Path, name: str) -> Path:
    """Give a directory its name, or the next one that is free: a bundle is never overwritten."""
    for number in range(1, 1000):
        place = folder / (name if number == 1 else f"{name}-{number}")
        if place.exists():
            continue
        try:
            made.rename(place)
        except OSError:
            if place.exists():
                continue
            raise
        return place
    raise OSError(f"{folder} holds a thousand bundles of this step already")


def _call(call: KeptCall, tensors: _Tensors) -> dict[str, Any]:
    return {
        "name": call.name,
        "args": _structure(list(call.args), tensors),
        "kwargs": _structure(call.kwargs, tensors),
        "random": {device: tensors.add(state) for device, state in call.random.items()},
        "host": _host(call.host),
        "buffers": {name: tensors.add(buffer) for name, buffer in call.buffers.items()},
        "autocast": {
            kind: [enabled, str(dtype).removeprefix("torch.")]
            for kind, (enabled, dtype) in call.autocast.items()
        },
        "outputs": [
            [list(path), list(kept.shape), tensors.add(kept.sample), kept.is_overwritten]
            for path, kept in call.outputs.items()
        ],
        "grads": [[list(path), tensors.add(grad)] for path, grad in call.grads.items()],
        "written": call.written
        != {p: _torch.writes(t) for p, t in tensors_in([call.args, call.kwargs])},
        "number": call.number,
        "compiled": call.compiled,
        "differentiated": call.differentiated,
        "casts": {
            name: [*map(_dtype, (cast.inputs, cast.outputs)), cast.moves]
            for name, cast in call.casts.items()
        },
        "training": {}
        if (module := call.module()) is None
        else {name: inner.training for name, inner in module.named_modules()},
    }


def _host(state: HostRandom) -> dict[str, Any]:
    """Return the random numbers of Python and numpy in lists; others of numpy than its own default are left out."""
    numpy = state.numpy
    if numpy is None or numpy["bit_generator"] != "MT19937":
        return {"python": state.python, "numpy": None}
    key, inner = numpy["state"]["key"].tolist(), numpy["state"]
    return {
        "python": state.python,
        "numpy": [key, int(inner["pos"]), int(numpy["has_gauss"]), float(numpy["gauss"])],
    }


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _loss(loss: KeptLoss, tensors: _Tensors) -> dict[str, Any]:
    return {
        "value": None if loss.value is None else tensors.add(loss.value),
        "nodes": [
            [node.name, _structure(node.saved, tensors), node.made_of] for node in loss.nodes
        ],
    }


def _weights(failed: FailedStep, tensors: _Tensors) -> dict[str, Any] | None:
    """Return where the weights are, by called module and name; ``None`` where they are too large."""
    modules = {call.name: call.module() for call in failed.calls}
    named = {
        (called, name): tensor
        for called, module in modules.items()
        if module is not None
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    if sum(t.numel() * t.element_size() for t in named.values()) > MAX_BYTES:
        return None
    found: dict[str, dict[str, Any]] = {}
    for (called, name), tensor in named.items():
        found.setdefault(called, {})[name] = tensors.add(tensor)
    return found


def _structure(value: Any, tensors: _Tensors, depth: int = 0) -> Any:
    """Return a structure as JSON holds it; what it cannot hold is named in its place."""
    tensors.left -= 1
    if tensors.left < 0 or depth > _DEEPEST:
        return tensors.lose("a structure without end") if not tensors.lost else None
    if isinstance(value, Tensor):
        plain = value.layout == torch.strided and type(value) in (Tensor, nn.Parameter)
        return tensors.add(value) if plain else tensors.lose(f"a tensor of the kind {_kind(value)}")
    if type(value) in (list, tuple, dict, OrderedDict):
        return _container(value, tensors, depth)
    if type(value) is float:
        return {"float": repr(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return value if type(value) in _PLAIN else tensors.lose(f"a value of the type {_kind(value)}")


def _container(value: Any, tensors: _Tensors, depth: int) -> Any:
    inner = functools.partial(_structure, tensors=tensors, depth=depth + 1)
    if isinstance(value, list | tuple):
        return {type(value).__name__: list(map(inner, value))}
    if all(type(key) is str for key in value):
        return {"dict": {key: inner(item) for key, item in value.items()}}
    return tensors.lose("a dict whose keys are not texts")


def _kind(value: object) -> str:
    if isinstance(value, Tensor) and type(value) is Tensor:
        return str(value.layout).removeprefix("torch.")
    return f"{type(value).__module__}.{type(value).__qualname__}"
