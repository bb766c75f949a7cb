"""A failed step as a directory, written whole or not at all, and read without running anything."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.errors import GradSurgeonError, printable, reason_of
from gradsurgeon.forensics.kept_step import MOST_CALLS, FailedStep, KeptCall, KeptLoss, KeptStep
from gradsurgeon.forensics.undisturbed import RandomState
from gradsurgeon.language.planning import named_modules
from gradsurgeon.language.schema import VERSION
from gradsurgeon.tensors import _bounded_load, _torch
from gradsurgeon.tensors.backward_graph import LossNode
from gradsurgeon.tensors.structure import Copied

FORMAT = 4
STEP = "step.pt"
_FACE = "step.json"
# Larger weights are left out; a replay then uses the weights of the model that it is given.
MAX_BYTES = 4 * 2**30
_MOST_BYTES = 6 * 2**30
_LONGEST = 300
_NO_WEIGHTS = "the bundle has no weights, so the replay used the weights of the new model"
_OTHER_MODEL = "this may not be the model of the bundle: its modules differ"
# The parts of a step and of a call that are in a bundle as they are.
_KEPT_NUMBERS = ("dropped", "passes", "updated")
_STEP_NAMES = ("modules", "rested", "bad")
_CALL_PARTS = ("args", "kwargs", "buffers", "outputs", "grads", "number", "compiled")


def with_bundle(diagnosis: Diagnosis, failed: FailedStep, folder: Path) -> Diagnosis:
    """Write a bundle; return the diagnosis with its path, or with the reason why there is none."""
    if not failed.kept.calls or failed.divided:
        return diagnosis
    try:
        return replace(diagnosis, bundle=str(_write(failed, diagnosis, folder)))
    except Exception as error:  # noqa: BLE001 # whatever a disk or a tensor raises: the diagnosis stays
        why = reason_of(error)
        if isinstance(error, _bounded_load.RefusedError):
            why = f"the model was given more than tensors, plain values, lists, tuples and dicts: {why}"
    return replace(diagnosis, no_bundle=why)


def _write(failed: FailedStep, diagnosis: Diagnosis, folder: Path) -> Path:
    """Write a bundle into a folder under a new name; return its path. After an error there is no part of it."""
    document = _document(failed)
    shown = ("format", "gradsurgeon", "torch", "device", "step", "rank", "scale", "bad", "rested")
    face = {**{key: document[key] for key in shown}, "diagnosis": str(diagnosis).splitlines()}
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".trap-", dir=folder))
    try:
        (made / _FACE).write_text(json.dumps(face, indent=1), encoding="utf-8")
        torch.save(Copied(document, _on_host).value, made / STEP)
        _bounded_load.check(made / STEP, _MOST_BYTES)
        # `mkdtemp` lets nobody else read.
        made.chmod(folder.stat().st_mode & 0o777)
        name = f"trap-step{failed.step}-rank{failed.rank}"
        number = 1
        while (place := folder / (f"{name}-{number}" if number > 1 else name)).exists():
            number += 1
        return made.rename(place)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _document(failed: FailedStep) -> dict[str, Any]:
    called = failed.called
    params = (param for module in called.values() for param in module.parameters())
    weights = {
        name: dict((*module.named_parameters(), *module.named_buffers()))
        for name, module in called.items()
    }
    size = sum(t.numel() * t.element_size() for named in weights.values() for t in named.values())
    return {
        "format": FORMAT,
        "gradsurgeon": VERSION,
        "torch": str(torch.__version__),
        "device": next((param.device.type for param in params), "cpu"),
        "step": failed.step,
        "rank": failed.rank,
        "scale": None if failed.scale is None else float(failed.scale),
        **{name: getattr(failed, name) for name in _STEP_NAMES},
        **{name: getattr(failed.kept, name) for name in _KEPT_NUMBERS},
        "losses": {
            number: (loss.value, [(n.name, n.readable_values(), n.made_of) for n in loss.nodes])
            for number, loss in failed.kept.losses.items()
        },
        "calls": [_written(call) for call in failed.kept.calls],
        "weights": None if size > MAX_BYTES else weights,
        "trees": {name: _tree_of(module) for name, module in called.items()},
    }


def _written(call: KeptCall) -> dict[str, Any]:
    module = call.module()
    random = call.random
    modules = [] if module is None else module.named_modules()
    return {
        "name": call.name,
        **{part: getattr(call, part) for part in _CALL_PARTS},
        "random": (random.torch, random.python, random.numpy),
        "autocast": call.autocast,
        "training": {name: inner.training for name, inner in modules},
    }


def _on_host(tensor: Tensor) -> Tensor:
    if _torch.is_freed(tensor):
        raise ValueError("a tensor of the step has no numbers any more")
    part = tensor.detach().resolve_conj().resolve_neg().cpu()
    # A file has whole storages: nothing of a large one that a small tensor is a part of.
    whole = part.untyped_storage().nbytes() if part.layout == torch.strided else part.nbytes
    if not part.nbytes <= whole <= 2 * part.nbytes:
        part = part.clone(memory_format=torch.contiguous_format)
    return part.detach().requires_grad_(tensor.requires_grad)


def read(place: str | os.PathLike[str], model: nn.Module) -> tuple[FailedStep, tuple[str, ...]]:
    """Read a bundle for a model; return the step, and the reasons to doubt a replay of it."""
    folder = Path(place)
    check(folder)
    try:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        document = _bounded_load.load(folder / STEP, _MOST_BYTES, device)
        return _step_in(document, model, device.type)
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
    if not (folder / STEP).is_file():
        raise GradSurgeonError(f"{printable(str(folder))} is no bundle: it has no file {STEP}")


def _step_in(
    document: Mapping[str, Any], model: nn.Module, device: str
) -> tuple[FailedStep, tuple[str, ...]]:
    if document["format"] != FORMAT:
        raise ValueError(f"it has another format than {FORMAT}")
    if len(document["calls"]) > MOST_CALLS:
        raise ValueError(f"a step has at most {MOST_CALLS} calls")
    doubts = [] if document["weights"] else [_NO_WEIGHTS]
    modules = named_modules(model)
    calls = []
    for entry in document["calls"]:
        name = str(entry["name"])
        module = modules.get(name)
        if module is None:
            raise GradSurgeonError(
                f"the model has no module {printable(name)}, which the bundle calls"
            )
        if document["trees"].get(name) != _tree_of(module):
            doubts.append(_OTHER_MODEL)
        calls.append(_call_in(document, entry, module, device))
    losses = {int(number): _loss(*loss) for number, loss in document["losses"].items()}
    numbers: dict[str, Any] = {name: int(document[name]) for name in _KEPT_NUMBERS}
    names: dict[str, Any] = {name: tuple(map(str, document[name])) for name in _STEP_NAMES}
    scale = None if document["scale"] is None else torch.tensor(float(document["scale"]))
    kept = KeptStep(calls, losses, **numbers)
    failed = FailedStep(kept, int(document["step"]), int(document["rank"]), scale, **names)
    return failed, tuple(dict.fromkeys(doubts))


def _call_in(
    document: Mapping[str, Any], entry: Mapping[str, Any], module: nn.Module, device: str
) -> KeptCall:
    """Return a call for this device: a bundle may come from a device of another kind."""
    name = str(entry["name"])
    made_on = str(document["device"])
    states, *host = entry["random"]
    known = {d: one.cpu() for d, one in states.items() if torch.device(d).type in ("cpu", device)}
    autocast = {
        device if kind == made_on else kind: (bool(enabled), dtype)
        for kind, (enabled, dtype) in entry["autocast"].items()
        if kind in ("cpu", made_on)
    }
    return KeptCall(
        module=lambda: module,
        name=name,
        random=RandomState(known, *host),
        autocast=autocast,
        weights=(document["weights"] or {}).get(name, {}),
        training=entry["training"],
        **{part: entry[part] for part in _CALL_PARTS},
    )


def _loss(value: Any, nodes: Iterable[Any]) -> KeptLoss:
    if value is not None and value.dim():
        raise ValueError("a loss is one number")
    made = [
        LossNode(str(name)[:_LONGEST], saved, list(map(int, made_of)))
        for name, saved, made_of in nodes
    ]
    return KeptLoss(value, made)


def _tree_of(module: nn.Module) -> dict[str, object]:
    shapes = {name: list(param.shape) for name, param in module.named_parameters()}
    kinds = {name: type(one).__name__ for name, one in module.named_modules()}
    return {**shapes, **kinds}
