"""A failed step as a directory that can be run again elsewhere: safetensors and JSON, nothing that runs code."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon.diagnosis import Diagnosis
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.planning import named_modules
from gradsurgeon.runtime.kept_calls import Buffers, FailedStep, Fingerprint, KeptCall, KeptLoss
from gradsurgeon.schema import VERSION
from gradsurgeon.tensors.backward_graph import LossNode
from gradsurgeon.tensors.structure import Path as TensorPath

FORMAT = 1
_JSON, _TENSORS = "bundle.json", "tensors.safetensors"
# Weights beyond it are left out; a replay takes those of the model that it is given.
MAX_BYTES = 4 * 2**30
_DEEPEST = 64
_PLAIN = (str, int, float, bool, type(None))


@dataclass(slots=True)
class _Tensors:
    """Tensors on their way into a file, each once."""

    by_key: dict[str, Tensor] = field(default_factory=dict)
    _keys: dict[int, str] = field(default_factory=dict)
    bytes: int = 0

    def add(self, tensor: Tensor) -> dict[str, Any]:
        if id(tensor) not in self._keys:
            key = self._keys[id(tensor)] = f"t{len(self._keys)}"
            # A file holds no two tensors that share memory.
            part = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
            self.by_key[key] = part.resolve_conj().cpu().clone().contiguous()
            self.bytes += part.numel() * part.element_size()
        return {"tensor": self._keys[id(tensor)], "grad": tensor.requires_grad}


def write(failed: FailedStep, diagnosis: Diagnosis, folder: Path) -> Path:
    """Write a bundle into a folder, under a name that nothing has yet; it is there as a whole or not at all.

    Raises:
        OSError: the folder cannot be written, or is full.
        ModuleNotFoundError: the library safetensors is missing.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 # an extra

    tensors = _Tensors()
    document = {
        "format": FORMAT,
        "gradsurgeon": VERSION,
        "torch": str(torch.__version__),
        "step": failed.step,
        "rank": failed.rank,
        "scale": None if failed.scale is None else float(failed.scale),
        "losses": {str(number): _loss(loss, tensors) for number, loss in failed.losses.items()},
        "modules": failed.modules,
        "rested": failed.rested,
        "passes": failed.passes,
        "dropped": failed.dropped,
        "diagnosis": str(diagnosis),
        "calls": [_call(call, tensors) for call in failed.calls],
        "weights": _weights(failed, tensors),
    }
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".trap-", dir=folder))
    try:
        save_file(tensors.by_key, made / _TENSORS)
        (made / _JSON).write_text(json.dumps(document, indent=1), encoding="utf-8")
        return _named(made, folder, f"trap-step{failed.step}-rank{failed.rank}")
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _named(made: Path, folder: Path, name: str) -> Path:
    """Give a directory its name, or the next one that is free: a bundle is never overwritten."""
    made.chmod(0o755)
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
        "number": call.number,
        "compiled": call.compiled,
        "training": {}
        if (module := call.module()) is None
        else {name: inner.training for name, inner in module.named_modules()},
    }


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
    if isinstance(value, Tensor):
        return tensors.add(value)
    if isinstance(value, list | tuple | Mapping) and depth < _DEEPEST:
        return _container(value, functools.partial(_structure, tensors=tensors, depth=depth + 1))
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return value if type(value) in _PLAIN else {"lost": type(value).__name__}


def _container(value: Any, inner: Callable[[Any], Any]) -> dict[str, Any]:
    if type(value) in (list, tuple):
        return {type(value).__name__: list(map(inner, value))}
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {"dict": {key: inner(item) for key, item in value.items()}}
    return {"lost": type(value).__name__}


def read(place: str | os.PathLike[str], model: nn.Module) -> tuple[FailedStep, tuple[str, ...]]:
    """Read a bundle for a model, and return the step with what makes it less certain.

    Raises:
        GradSurgeonError: it is no bundle, is damaged, or is not of this model.
    """
    folder = Path(place)
    document, tensors = _document(folder), _tensors(folder)
    try:
        return _Reader(folder, model, tensors).step(document)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from error


def _damaged(folder: Path, why: str) -> GradSurgeonError:
    return GradSurgeonError(
        f"{printable(str(folder))}: this is no bundle, or it is damaged: {printable(why)}"
    )


def _document(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / _JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(folder, str(error)) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _damaged(folder, f"its {_JSON} is not of format {FORMAT}")
    return document


def _tensors(folder: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError  # noqa: PLC0415 # an extra
        from safetensors.torch import load_file  # noqa: PLC0415 # the same
    except ModuleNotFoundError as error:
        raise GradSurgeonError(
            "bundles need the library safetensors: pip install 'gradsurgeon[bundle]'"
        ) from error
    try:
        return dict(load_file(folder / _TENSORS))
    except (OSError, SafetensorError) as error:
        raise _damaged(folder, str(error)) from error


class _Reader:
    def __init__(self, folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._folder, self._tensors = folder, tensors
        self._modules = named_modules(model)
        first = next(model.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._doubts: list[str] = []

    def step(self, document: Mapping[str, Any]) -> tuple[FailedStep, tuple[str, ...]]:
        if document["torch"] != str(torch.__version__):
            made, here = printable(str(document["torch"])), torch.__version__
            self._doubts.append(f"the bundle is of torch {made}, and this is torch {here}")
        weights = document["weights"]
        if weights is None:
            self._doubts.append(
                "the bundle has no weights: those of the model as it was built were taken"
            )
        scale = document["scale"]
        failed = FailedStep(
            [self._call(entry, weights or {}) for entry in document["calls"]],
            int(document["dropped"]),
            int(document["passes"]),
            int(document["step"]),
            int(document["rank"]),
            None if scale is None else torch.tensor(float(scale)),
            tuple(map(str, document["modules"])),
            tuple(map(str, document["rested"])),
            {int(number): self._loss(entry) for number, entry in document["losses"].items()},
        )
        return failed, tuple(dict.fromkeys(self._doubts))

    def _call(self, entry: Mapping[str, Any], weights: Mapping[str, Any]) -> KeptCall:
        name = str(entry["name"])
        module = self._modules.get(name)
        if module is None:
            raise GradSurgeonError(
                f"the model has no module {printable(name)}, which the bundle calls"
            )
        there = {key: self._tensor(value) for key, value in weights.get(name, {}).items()}
        _check(module, there)
        return KeptCall(
            module=lambda: module,
            name=name,
            args=tuple(self._structure(entry["args"])),
            kwargs=self._structure(entry["kwargs"]),
            written={},
            random={
                device: self._tensor(value).cpu()
                for device, value in entry["random"].items()
                if torch.device(device).type in ("cpu", self._device.type)
            },
            buffers=Buffers({key: self._tensor(value) for key, value in entry["buffers"].items()}),
            autocast={
                kind: (bool(enabled), _dtype(dtype))
                for kind, (enabled, dtype) in entry["autocast"].items()
                if kind in ("cpu", self._device.type)
            },
            outputs={
                _path(path): Fingerprint(tuple(shape), self._tensor(sample), -1 if over else 0)
                for path, shape, sample, over in entry["outputs"]
            },
            grads={_path(path): self._tensor(grad) for path, grad in entry["grads"]},
            number=int(entry["number"]),
            compiled=bool(entry["compiled"]),
            weights=there,
            training={str(key): bool(value) for key, value in entry["training"].items()},
        )

    def _loss(self, entry: Mapping[str, Any]) -> KeptLoss:
        value = entry["value"]
        return KeptLoss(
            None if value is None else self._tensor(value),
            [
                LossNode(str(name), self._structure(saved), [int(maker) for maker in made_of])
                for name, saved, made_of in entry["nodes"]
            ],
        )

    def _tensor(self, entry: Mapping[str, Any]) -> Tensor:
        tensor = self._tensors[entry["tensor"]].to(self._device)
        return tensor.requires_grad_(bool(entry["grad"]) and tensor.is_floating_point())

    def _structure(self, entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        ((kind, value),) = [(k, v) for k, v in entry.items() if k != "grad"]
        if kind == "tensor":
            return self._tensor(entry)
        if kind == "float":
            return float(value)
        if kind == "dtype":
            return _dtype(value)
        if kind == "dict":
            return {key: self._structure(item) for key, item in value.items()}
        if kind in ("list", "tuple"):
            items = [self._structure(item) for item in value]
            return items if kind == "list" else tuple(items)
        raise GradSurgeonError(
            f"the model was given a {printable(str(value))}, which a bundle cannot hold: tensors, numbers, texts, "
            "lists, tuples and dicts can be replayed"
        )


def _check(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    if not weights:
        return
    have = {
        name: tuple(t.shape) for name, t in (*module.named_parameters(), *module.named_buffers())
    }
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if have == given:
        return
    problems = [
        *(f"{printable(name)} is not in the model" for name in given.keys() - have.keys()),
        *(f"{printable(name)} is not in the bundle" for name in have.keys() - given.keys()),
        *(
            f"{printable(name)} has the shape {list(have[name])}, and {list(shape)} in the bundle"
            for name, shape in given.items()
            if name in have and have[name] != shape
        ),
    ]
    shown = "\n  ".join(sorted(problems)[:8])
    raise GradSurgeonError(f"this is not the model of the bundle:\n  {shown}")


def _path(steps: Any) -> TensorPath:
    return tuple(step if isinstance(step, int) else str(step) for step in steps)


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")  # noqa: TRY004 # a text that is wrong
    return dtype
