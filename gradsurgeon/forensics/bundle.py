"""A failed step as a directory that can be run again elsewhere: safetensors and JSON, nothing that runs code."""

from __future__ import annotations

import functools
import json
import os
import shutil
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon.diagnosis import Diagnosis
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.planning import named_modules
from gradsurgeon.runtime.kept_calls import (
    Buffers,
    FailedStep,
    Fingerprint,
    KeptCall,
    KeptLoss,
    writes,
)
from gradsurgeon.schema import VERSION
from gradsurgeon.tensors.backward_graph import LossNode
from gradsurgeon.tensors.structure import Path as TensorPath
from gradsurgeon.tensors.structure import tensors_in

FORMAT = 1
_JSON, _TENSORS = "bundle.json", "tensors.safetensors"
# Weights beyond it are left out; a replay takes those of the model that it is given.
MAX_BYTES = 4 * 2**30
_DEEPEST = 64
_PLAIN = (str, int, bool, type(None))
_LARGEST_JSON, _LONGEST = 2**28, 300
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
        "diagnosis": str(diagnosis),
        "calls": [_call(call, tensors) for call in failed.calls],
        "weights": _weights(failed, tensors),
    }
    if tensors.lost:
        raise NotWrittenError(f"the model was given {tensors.lost[0]}, {_HOLDS}")
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".trap-", dir=folder))
    try:
        save_file(tensors.by_key, made / _TENSORS)
        (made / _JSON).write_text(json.dumps(document, indent=1), encoding="utf-8")
        # As the folder of the run may be read, and not as files for the time being.
        (made / _TENSORS).chmod((made / _JSON).stat().st_mode & 0o777)
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
        "written": call.written != {p: writes(t) for p, t in tensors_in([call.args, call.kwargs])},
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


def read(place: str | os.PathLike[str], model: nn.Module) -> tuple[FailedStep, tuple[str, ...]]:
    """Read a bundle for a model, and return the step with what makes it less certain.

    Raises:
        GradSurgeonError: it is no bundle, is damaged, or is not of this model.
    """
    folder = Path(place)
    check(folder)
    try:
        document, tensors = _document(folder), _tensors(folder)
        return _Reader(model, tensors).step(document)
    except GradSurgeonError:
        raise
    except Exception as error:
        # Whatever a file from elsewhere brings about.
        raise _damaged(folder, f"{type(error).__name__}: {error}") from error


def check(folder: Path) -> None:
    """Refuse a directory that is no bundle.

    Raises:
        GradSurgeonError: it is none.
    """
    for name in (_JSON, _TENSORS):
        try:
            mode = (folder / name).lstat().st_mode
        except OSError as error:
            inside = sorted(folder.glob("trap-step*")) if folder.is_dir() else []
            hint = f"; it has {printable(inside[0].name)}: name that" if inside else ""
            why = f"it has no {name} ({error.strerror}){hint}"
            raise GradSurgeonError(f"{printable(str(folder))} is no bundle: {why}") from error
        if not stat.S_ISREG(mode):
            raise GradSurgeonError(f"{printable(str(folder))} is no bundle: its {name} is no file")
    if (folder / _JSON).stat().st_size > _LARGEST_JSON:
        raise _damaged(folder, f"its {_JSON} is larger than any that was written")


def _damaged(folder: Path, why: str) -> GradSurgeonError:
    shown = printable(why[:_LONGEST])
    return GradSurgeonError(f"{printable(str(folder))} is no bundle, or it is damaged: {shown}")


def _document(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / _JSON).read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError("it holds no object")  # noqa: TRY004 # a file that is wrong
    if document.get("format") != FORMAT:
        raise GradSurgeonError(
            f"{printable(str(folder))}: this gradsurgeon reads bundles of format {FORMAT}, and this one is of "
            f"another: written by gradsurgeon {printable(str(document.get('gradsurgeon'))[:40])}"
        )
    return document


def _tensors(folder: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file  # noqa: PLC0415 # an extra
    except ModuleNotFoundError as error:
        raise GradSurgeonError(
            "bundles need the library safetensors: pip install 'gradsurgeon[bundle]'"
        ) from error
    return dict(load_file(folder / _TENSORS))


class _Reader:
    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._modules = named_modules(model)
        first = next(model.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._made_on = self._device.type
        self._doubts: list[str] = []

    def step(self, document: Mapping[str, Any]) -> tuple[FailedStep, tuple[str, ...]]:
        if document["torch"] != str(torch.__version__):
            made, here = printable(str(document["torch"])), torch.__version__
            self._doubts.append(f"the bundle is of torch {made}, and this is torch {here}")
        self._made_on = str(document["device"])
        if self._made_on != self._device.type:
            self._doubts.append(
                f"the step ran on {printable(self._made_on)}, and the replay on {self._device.type}: kernels and "
                "random numbers are others"
            )
        weights = document["weights"]
        if not weights:
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
            bad=tuple(map(str, document["bad"])),
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
        if entry["written"]:
            self._doubts.append("an input was written to after the call")
        return KeptCall(
            module=lambda: module,
            name=name,
            args=tuple(self._structure(entry["args"], list)),
            kwargs=self._structure(entry["kwargs"], dict),
            written={},
            random={
                device: self._tensor(value).cpu()
                for device, value in entry["random"].items()
                if torch.device(device).type in ("cpu", self._device.type)
            },
            buffers=Buffers({key: self._tensor(value) for key, value in entry["buffers"].items()}),
            autocast={
                self._device.type if kind == self._made_on else kind: (bool(enabled), _dtype(dtype))
                for kind, (enabled, dtype) in entry["autocast"].items()
                if kind in ("cpu", self._made_on)
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
                LossNode(
                    str(name)[:_LONGEST],
                    self._structure(saved, dict),
                    [int(maker) for maker in made_of],
                )
                for name, saved, made_of in entry["nodes"]
            ],
        )

    def _tensor(self, entry: Mapping[str, Any]) -> Tensor:
        tensor = self._tensors[entry["tensor"]].to(self._device)
        strides = [int(stride) for stride in entry.get("stride", ())]
        if strides and tensor.numel():
            reach = 1 + sum((n - 1) * by for n, by in zip(tensor.shape, strides, strict=True))
            # One that is expanded, or has large gaps, is laid out as it lies in the file.
            if min(strides) > 0 and reach <= 2 * tensor.numel():
                laid_out = torch.empty_strided(
                    tensor.shape, strides, dtype=tensor.dtype, device=self._device
                )
                tensor = laid_out.copy_(tensor)
        real = tensor.is_floating_point() or tensor.is_complex()
        return tensor.requires_grad_(bool(entry["grad"]) and real)

    def _structure(self, entry: Any, wanted: type | None = None) -> Any:
        value = self._built(entry)
        if wanted is not None and not isinstance(value, wanted):
            raise TypeError(f"a {wanted.__name__} was to stand there")
        return value

    def _built(self, entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        if "tensor" in entry:
            return self._tensor(entry)
        ((kind, value),) = entry.items()
        if kind == "float":
            return float(value)
        if kind == "dtype":
            return _dtype(value)
        if kind == "dict":
            return {key: self._built(item) for key, item in value.items()}
        items = [self._built(item) for item in value]
        return {"list": items, "tuple": tuple(items)}[kind]


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
