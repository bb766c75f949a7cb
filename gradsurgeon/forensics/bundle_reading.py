"""Reads a failed step from a directory that may come from anywhere: nothing in it is run."""

from __future__ import annotations

import hashlib
import inspect
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon import _bounded_load, _torch
from gradsurgeon.distributed.fully_shard import Cast
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.forensics.kept_calls import MOST_CALLS
from gradsurgeon.forensics.kept_step import (
    FailedStep,
    Fingerprint,
    HostRandom,
    KeptCall,
    KeptLoss,
)
from gradsurgeon.planning import named_modules
from gradsurgeon.tensors.backward_graph import LossNode
from gradsurgeon.tensors.structure import Copied

FORMAT = 3
STEP = "step.pt"
# Weights, the kept calls, and some more.
MOST_BYTES = 6 * 2**30
_LONGEST = 300
# The parts of a step and of a call that are in a bundle as they are.
STEP_NUMBERS = ("dropped", "passes", "step", "rank", "updated")
STEP_NAMES = ("modules", "rested", "bad")
CALL_PARTS = ("args", "kwargs", "buffers", "grads", "number", "compiled", "training")


def read(place: str | os.PathLike[str], model: nn.Module) -> tuple[FailedStep, tuple[str, ...]]:
    """Read a bundle for a model; return the step, and the reasons to doubt a replay of it.

    Raises:
        GradSurgeonError: the directory is no bundle, is damaged, or is not of this model.
    """
    folder = Path(place)
    check(folder)
    try:
        document = _bounded_load.load(folder / STEP, MOST_BYTES)
        _check_format(folder, document)
        return _Reader(model, document).step(document)
    except GradSurgeonError:
        raise
    except Exception as error:
        # A file from elsewhere can make anything fail.
        kind = "" if isinstance(error, _bounded_load.RefusedError) else f"{type(error).__name__}: "
        why = printable(f"{kind}{error}"[:_LONGEST])
        raise GradSurgeonError(
            f"{printable(str(folder))} is no bundle, or it is damaged: {why}"
        ) from error


def check(folder: Path) -> None:
    """Refuse a directory that is no bundle.

    Raises:
        GradSurgeonError: it is none.
    """
    try:
        mode = (folder / STEP).lstat().st_mode
    except OSError as error:
        why = f"it has no {STEP} ({error.strerror})"
        inside = sorted(folder.glob("trap-step*")) if folder.is_dir() else []
        if inside:
            why += f"; it has {printable(inside[0].name)}: name that"
        raise GradSurgeonError(f"{printable(str(folder))} is no bundle: {why}") from error
    if not stat.S_ISREG(mode):
        raise GradSurgeonError(f"{printable(str(folder))} is no bundle: its {STEP} is no file")


def _check_format(folder: Path, document: Mapping[str, Any]) -> None:
    if document["format"] != FORMAT:
        raise GradSurgeonError(
            f"{printable(str(folder))} has another format than {FORMAT}, which this version reads: it was written by "
            f"gradsurgeon {printable(str(document.get('gradsurgeon'))[:40])}"
        )


class _Reader:
    def __init__(self, model: nn.Module, document: Mapping[str, Any]) -> None:
        self._modules = named_modules(model)
        first = next(model.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._made_on = str(document["device"])
        code = document["code"]
        self._code: Mapping[str, Any] = code if isinstance(code, dict) else {}
        self._doubts: list[str] = []

    def step(self, document: Mapping[str, Any]) -> tuple[FailedStep, tuple[str, ...]]:
        if document["torch"] != str(torch.__version__):
            made, here = printable(str(document["torch"])), torch.__version__
            self._doubts.append(
                f"the bundle was written with torch {made}, and this is torch {here}"
            )
        if self._made_on != self._device.type:
            self._doubts.append(
                f"the step ran on {printable(self._made_on)}, and the replay on {self._device.type}, with other kernels "
                "and random numbers"
            )
        weights = self._placed(document["weights"])
        if not weights:
            self._doubts.append(
                "the bundle has no weights, so the replay used the weights of the new model"
            )
        if len(document["calls"]) > MOST_CALLS:
            raise ValueError(f"a step has at most {MOST_CALLS} calls")
        scale = document["scale"]
        parts: dict[str, Any] = {name: int(document[name]) for name in STEP_NUMBERS}
        parts |= {name: tuple(map(str, document[name])) for name in STEP_NAMES}
        failed = FailedStep(
            calls=[self._call(entry, weights or {}) for entry in document["calls"]],
            scale=None if scale is None else torch.tensor(float(scale)),
            losses={int(number): self._loss(*loss) for number, loss in document["losses"].items()},
            **parts,
        )
        return failed, tuple(dict.fromkeys(self._doubts))

    def _call(self, entry: Mapping[str, Any], weights: Mapping[str, Any]) -> KeptCall:
        name = str(entry["name"])
        module = self._modules.get(name)
        if module is None:
            raise GradSurgeonError(
                f"the model has no module {printable(name)}, which the bundle calls"
            )
        there = weights.get(name, {})
        _check_weights(module, there)
        if not self._code.get(name) or self._code[name] != code_of(module):
            self._doubts.append(
                "this may not be the model of the bundle: its modules, or the source code of their classes, differ or "
                "are unknown"
            )
        if entry["written"]:
            self._doubts.append("an input was written to after the call")
        return KeptCall(
            module=lambda: module,
            name=name,
            written={},
            random={
                device: state
                for device, state in entry["random"].items()
                if torch.device(device).type in ("cpu", self._device.type)
            },
            host=HostRandom(*entry["host"]),
            autocast={
                self._device.type if kind == self._made_on else kind: (bool(enabled), dtype)
                for kind, (enabled, dtype) in entry["autocast"].items()
                if kind in ("cpu", self._made_on)
            },
            outputs={
                path: Fingerprint(shape, sample, -1 if over else _torch.writes(sample))
                for path, (shape, sample, over) in self._placed(entry["outputs"]).items()
            },
            casts={key: Cast(*cast) for key, cast in entry["casts"].items()},
            weights=there,
            **{part: self._placed(entry[part]) for part in CALL_PARTS},
        )

    def _loss(self, value: Any, nodes: Any) -> KeptLoss:
        if value is not None and value.dim():
            raise ValueError("a loss is one number")
        return KeptLoss(
            self._placed(value),
            [
                LossNode(str(name)[:_LONGEST], self._placed(saved), list(map(int, made_of)))
                for name, saved, made_of in nodes
            ],
        )

    def _placed(self, value: Any) -> Any:
        """Return a structure with its tensors on the device of the model."""
        if self._device.type == "cpu":
            return value
        return Copied(
            value, lambda t: t.detach().to(self._device).requires_grad_(t.requires_grad)
        ).value


def _check_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own = {name: list(t.shape) for name, t in (*module.named_parameters(), *module.named_buffers())}
    given = {name: list(tensor.shape) for name, tensor in weights.items()}
    other = sorted(n for n in own.keys() | given.keys() if own.get(n) != given.get(n))
    if weights and other:
        shown = "".join(
            f"\n  {printable(name)} has the shape {own.get(name, 'none')}, and {given.get(name, 'none')} in the bundle"
            for name in other[:8]
        )
        raise GradSurgeonError(f"this is not the model of the bundle:{shown}")


def code_of(module: nn.Module) -> str:
    """Return a hash of a module tree and of the source of its classes outside of torch; empty if a source is missing."""
    known = {kind: _code_of(kind) for kind in {type(inner) for inner in module.modules()}}
    if not all(known.values()):
        return ""
    tree = "".join(f"{name}: {known[type(inner)]}\n" for name, inner in module.named_modules())
    return hashlib.sha256(tree.encode()).hexdigest()[:16]


def _code_of(kind: type) -> str:
    # `fully_shard` puts a class of its own before the class of the script.
    classes = [one for one in kind.__mro__ if not one.__module__.startswith("torch.distributed.")]
    own = [one for one in classes if one.__module__.partition(".")[0] not in ("torch", "builtins")]
    try:
        return classes[0].__qualname__ + "".join(map(inspect.getsource, own))
    except (OSError, TypeError):
        return ""
