"""Reads a failed step from a directory that may come from anywhere: safetensors and JSON, nothing that runs code."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon.distributed.fully_shard import Cast
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.forensics.kept_step import (
    Buffers,
    FailedStep,
    Fingerprint,
    HostRandom,
    KeptCall,
    KeptLoss,
)
from gradsurgeon.planning import named_modules
from gradsurgeon.tensors.backward_graph import LossNode
from gradsurgeon.tensors.structure import Path as TensorPath

FORMAT = 1
JSON, TENSORS = "bundle.json", "tensors.safetensors"
_LARGEST, _LONGEST = 2**28, 300


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
    for name in (JSON, TENSORS):
        try:
            mode = (folder / name).lstat().st_mode
        except OSError as error:
            inside = sorted(folder.glob("trap-step*")) if folder.is_dir() else []
            hint = f"; it has {printable(inside[0].name)}: name that" if inside else ""
            why = f"it has no {name} ({error.strerror}){hint}"
            raise GradSurgeonError(f"{printable(str(folder))} is no bundle: {why}") from error
        if not stat.S_ISREG(mode):
            raise GradSurgeonError(f"{printable(str(folder))} is no bundle: its {name} is no file")
    if (folder / JSON).stat().st_size > _LARGEST:
        raise _damaged(folder, f"its {JSON} is larger than any that was written")


def _damaged(folder: Path, why: str) -> GradSurgeonError:
    shown = printable(why[:_LONGEST])
    return GradSurgeonError(f"{printable(str(folder))} is no bundle, or it is damaged: {shown}")


def _document(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / JSON).read_text(encoding="utf-8"))
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
    return dict(load_file(folder / TENSORS))


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
        code = document.get("code")
        self._code: Mapping[str, Any] = code if isinstance(code, dict) else {}
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
            updated=bool(document.get("updated")),
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
        self._doubts += _other_code(module, self._code.get(name))
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
            host=_host(entry.get("host", {})),
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
            differentiated=bool(entry.get("differentiated")),
            casts=dict(_casts(module, entry.get("casts", {}))),
            weights=there,
            training={str(key): bool(value) for key, value in entry["training"].items()},
        )

    def _loss(self, entry: Mapping[str, Any]) -> KeptLoss:
        value = None if entry["value"] is None else self._tensor(entry["value"])
        if value is not None and value.dim():
            raise ValueError("a loss is one number")
        return KeptLoss(
            value,
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

    def _structure(self, entry: Any, wanted: type) -> Any:
        value = self._built(entry)
        if not isinstance(value, wanted):
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


def code_of(module: nn.Module) -> dict[str, list[str]]:
    """Return the name of the class of each module, and a hash of what it is written as beside classes of torch.

    The hash is empty where the source is not there.
    """
    named = dict(module.named_modules())
    codes = {kind: _code_of(kind) for kind in set(map(type, named.values()))}
    return {name: codes[type(inner)] for name, inner in named.items()}


def _code_of(kind: type) -> list[str]:
    # `fully_shard` puts a class of its own before that of the script.
    classes = [one for one in kind.__mro__ if not one.__module__.startswith("torch.distributed.")]
    own = [one for one in classes if one.__module__.partition(".")[0] not in ("torch", "builtins")]
    try:
        sources = "".join(map(inspect.getsource, own))
    except (OSError, TypeError):
        return [classes[0].__qualname__, ""]
    return [classes[0].__qualname__, hashlib.sha256(sources.encode()).hexdigest()[:16]]


def _other_code(module: nn.Module, told: Any) -> Iterator[str]:
    """Yield why the code of a model may be another than that of the bundle."""
    if not isinstance(told, dict):
        yield "the bundle does not tell the code of its model: that of this one may be another"
        return
    here = code_of(module)
    for name in sorted(here.keys() | told.keys()):
        shown = f"module {printable(name[:_LONGEST])}" if name else "the root"
        if name not in here or name not in told:
            place = "bundle" if name in told else "model"
            yield f"this is not the model of the bundle: {shown} is in the {place} alone"
        elif here[name] == told[name] and here[name][1]:
            continue
        else:
            (kind, source), (kind_then, source_then) = here[name], told[name]
            then = printable(str(kind_then)[:_LONGEST])
            if kind == then and not (source and source_then):
                yield f"the source of {shown} ({kind}) is not there, and may be another than in the bundle"
            else:
                how = (
                    f"is of the class {kind}, and of {then} in the bundle"
                    if kind != then
                    else f"({kind}) is written otherwise"
                )
                yield f"this is not the model of the bundle: {shown} {how}"
        # One is enough to doubt it.
        return


def _casts(module: nn.Module, entries: Mapping[str, Any]) -> Iterator[tuple[str, Cast]]:
    there = named_modules(module)
    for name, (inputs, outputs, moves) in entries.items():
        if name not in there:
            raise GradSurgeonError(
                f"the model has no module {printable(name)}, whose dtype the bundle tells"
            )
        given, gives = (None if dtype is None else _dtype(dtype) for dtype in (inputs, outputs))
        yield name, Cast(given, gives, bool(moves))


def _host(entry: Mapping[str, Any]) -> HostRandom:
    python, numpy = entry.get("python"), entry.get("numpy")
    state: dict[str, Any] | None = None
    if numpy is not None:
        key, position, has_gauss, gauss = numpy
        state = {"bit_generator": "MT19937", "has_gauss": int(has_gauss), "gauss": float(gauss)}
        state["state"] = {
            "key": torch.tensor(key, dtype=torch.uint32).numpy(),
            "pos": int(position),
        }
    if python is not None:
        version, numbers, gauss = python
        python = version, tuple(map(int, numbers)), gauss
    return HostRandom(python, state)


def _path(steps: Any) -> TensorPath:
    return tuple(step if isinstance(step, int) else str(step) for step in steps)


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")  # noqa: TRY004 # a text that is wrong
    return dtype
