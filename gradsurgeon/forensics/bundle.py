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

FORMAT = 5
STEP = "step.pt"
_FACE = "step.json"
# Larger weights are left out; a replay then uses the weights of the model that it is given.
MAX_BYTES = 4 * 2**30
_MOST_BYTES = 6 * 2**30
_LONGEST = 300
_NO_WEIGHTS = "the bundle has no weights, so the replay used the weights of the new model"
_OTHER_MODEL = "this may not be the model of the bundle: its modules differ"
# The parts of a step and of a call that are in a bundle as they are.
_FACE_PARTS = ("format", "gradsurgeon", "torch", "device", "step", "rank", "scale", "bad", "rested")
_CALL_PARTS = ("args", "kwargs", "buffers", "outputs", "grads", "number", "compiled", "sample_ids")


def with_bundle(diagnosis: Diagnosis, failed: FailedStep, folder: Path | None) -> Diagnosis:
    """Write a bundle, if there is a folder for it; return the diagnosis with its path, or with the reason why there is none."""
    if folder is None or not failed.kept.calls or failed.divided:
        return diagnosis
    try:
        place = _write(failed, diagnosis, folder)
    except Exception as error:  # noqa: BLE001 # whatever a disk or a tensor raises: the diagnosis stays
        why = reason_of(error)
        if isinstance(error, _bounded_load.RefusedError):
            why = f"the model was given more than tensors, plain values, lists, tuples and dicts: {why}"
        return replace(diagnosis, no_bundle=why)
    return replace(diagnosis, bundle=str(place))


def _write(failed: FailedStep, diagnosis: Diagnosis, folder: Path) -> Path:
    """Write a bundle into a folder under a new name; return its path. After an error there is no part of it."""
    document = _document(failed)
    face = {part: document[part] for part in _FACE_PARTS}
    face["diagnosis"] = diagnosis.to_json()
    face["text"] = str(diagnosis).splitlines()
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".trap-", dir=folder))
    try:
        (unfinished / _FACE).write_text(json.dumps(face, indent=1), encoding="utf-8")
        torch.save(Copied(document, _on_host).value, unfinished / STEP)
        _bounded_load.check(unfinished / STEP, _MOST_BYTES)
        # `mkdtemp` lets nobody else read.
        unfinished.chmod(folder.stat().st_mode & 0o777)
        return unfinished.rename(_free_place(folder, failed))
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _free_place(folder: Path, failed: FailedStep) -> Path:
    name = f"trap-step{failed.step}-rank{failed.rank}"
    place = folder / name
    number = 1
    while place.exists():
        number += 1
        place = folder / f"{name}-{number}"
    return place


def _document(failed: FailedStep) -> dict[str, Any]:
    kept = failed.kept
    called = failed.called
    return {
        "format": FORMAT,
        "gradsurgeon": VERSION,
        "torch": str(torch.__version__),
        "device": _device_of(called.values()).type,
        "step": failed.step,
        "rank": failed.rank,
        "scale": failed.scale,
        "modules": failed.modules,
        "rested": failed.rested,
        "bad": failed.bad,
        "dropped": kept.dropped,
        "passes": kept.passes,
        "updated": kept.updated,
        "losses": _losses_for_file(kept),
        "calls": [_call_for_file(call) for call in kept.calls],
        "weights": _weights_for_file(called),
        "trees": {name: repr(module) for name, module in called.items()},
    }


def _losses_for_file(kept: KeptStep) -> dict[int, tuple[Tensor | None, list[Any]]]:
    losses = {}
    for number, loss in kept.losses.items():
        nodes = [(node.name, node.readable_values(), node.made_of) for node in loss.nodes]
        losses[number] = (loss.value, nodes)
    return losses


def _weights_for_file(called: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]] | None:
    """Return parameters and buffers by name of each called module, ``None`` if they are too large for a file."""
    weights = {}
    size = 0
    for name, module in called.items():
        tensors: dict[str, Tensor] = dict(module.named_parameters())
        tensors.update(module.named_buffers())
        for tensor in tensors.values():
            size += tensor.numel() * tensor.element_size()
        weights[name] = tensors
    if size > MAX_BYTES:
        return None
    return weights


def _call_for_file(call: KeptCall) -> dict[str, Any]:
    parts: dict[str, Any] = {"name": call.name}
    for part in _CALL_PARTS:
        parts[part] = getattr(call, part)
    random = call.random
    parts["random"] = (random.torch, random.python, random.numpy)
    parts["autocast"] = call.autocast
    training = {}
    module = call.module()
    if module is not None:
        for name, inner in module.named_modules():
            training[name] = inner.training
    parts["training"] = training
    return parts


def _device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Return the device of the first parameter."""
    for module in modules:
        for param in module.parameters():
            return param.device
    return torch.device("cpu")


def _on_host(tensor: Tensor) -> Tensor:
    if _torch.is_freed(tensor):
        raise ValueError("a tensor of the step has no numbers any more")
    part = tensor.detach().resolve_conj().resolve_neg().cpu()
    if part.layout == torch.strided:
        # `torch.save` writes whole storages. A part of a large storage is copied before.
        storage_bytes = part.untyped_storage().nbytes()
        if not part.nbytes <= storage_bytes <= 2 * part.nbytes:
            part = part.clone(memory_format=torch.contiguous_format)
    return part.detach().requires_grad_(tensor.requires_grad)


def read(place: str | os.PathLike[str], model: nn.Module) -> tuple[FailedStep, tuple[str, ...]]:
    """Read a bundle for a model; return the step, and the reasons to doubt a replay of it."""
    folder = Path(place)
    check(folder)
    try:
        device = _device_of([model])
        document = _bounded_load.load(folder / STEP, _MOST_BYTES, device)
        return _step_in(document, model, device.type)
    except GradSurgeonError:
        raise
    except Exception as error:
        # A file from elsewhere can make anything fail.
        why = reason_of(error)[:_LONGEST]
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
    doubts = []
    if not document["weights"]:
        doubts.append(_NO_WEIGHTS)
    modules = named_modules(model)
    calls = []
    for entry in document["calls"]:
        name = str(entry["name"])
        module = modules.get(name)
        if module is None:
            raise GradSurgeonError(
                f"the model has no module {printable(name)}, which the bundle calls"
            )
        if document["trees"].get(name) != repr(module):
            doubts.append(_OTHER_MODEL)
        calls.append(_call_in(document, entry, module, device))
    losses = {}
    for number, (value, nodes) in document["losses"].items():
        losses[int(number)] = _loss_in(value, nodes)
    scale = document["scale"]
    if scale is not None:
        scale = float(scale)
    dropped = int(document["dropped"])
    kept = KeptStep(
        calls, losses, dropped, passes=int(document["passes"]), updated=bool(document["updated"])
    )
    failed = FailedStep(
        kept,
        int(document["step"]),
        int(document["rank"]),
        scale,
        modules=tuple(map(str, document["modules"])),
        bad=tuple(map(str, document["bad"])),
        rested=tuple(map(str, document["rested"])),
    )
    return failed, tuple(dict.fromkeys(doubts))


def _call_in(
    document: Mapping[str, Any], entry: Mapping[str, Any], module: nn.Module, device: str
) -> KeptCall:
    """Return a call for this device: a bundle may come from a device of another kind."""
    name = str(entry["name"])
    made_on = str(document["device"])
    states, *host = entry["random"]
    device_states = {}
    for place, state in states.items():
        if torch.device(place).type in ("cpu", device):
            device_states[place] = state.cpu()
    autocast = {}
    for kind, (enabled, dtype) in entry["autocast"].items():
        if kind == made_on:
            kind = device  # noqa: PLW2901 # as the model is there now
        autocast[kind] = (bool(enabled), dtype)
    weights = {}
    if document["weights"]:
        weights = document["weights"].get(name, {})
    return KeptCall(
        module=lambda: module,
        name=name,
        random=RandomState(device_states, *host),
        autocast=autocast,
        weights=weights,
        training=entry["training"],
        **{part: entry[part] for part in _CALL_PARTS},
    )


def _loss_in(value: Any, nodes: Iterable[Any]) -> KeptLoss:
    if value is not None and value.dim():
        raise ValueError("a loss is one number")
    loss_nodes = []
    for name, saved, made_of in nodes:
        node = LossNode(str(name)[:_LONGEST], saved, [int(index) for index in made_of])
        loss_nodes.append(node)
    return KeptLoss(value, loss_nodes)
