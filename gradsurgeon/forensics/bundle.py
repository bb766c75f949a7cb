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

FORMAT = 6
STEP = "step.pt"
_FACE = "step.json"
# Larger weights are left out; a replay then uses the weights of the model that it is given.
MAX_BYTES = 4 * 2**30
_MOST_BYTES = 6 * 2**30
_LONGEST = 300
_NO_WEIGHTS = "the bundle has no weights, so the replay used the weights of the new model"
_OTHER_MODEL = "this may not be the model of the bundle: its modules differ"
# The parts of a step and of a call that are in a bundle as they are.
_NAMES = ("modules", "bad", "rested", "written")
_COUNTS = ("dropped", "passes", "updated")
_CALL_PARTS = ("args", "kwargs", "buffers", "outputs", "grads", "numbers", "compiled", "sample_ids")


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
    facts = _facts(failed)
    face = {**facts, "diagnosis": diagnosis.to_json(), "text": str(diagnosis).splitlines()}
    document = {**facts, **_contents(failed)}
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


def _facts(failed: FailedStep) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "gradsurgeon": VERSION,
        "torch": str(torch.__version__),
        "device": _device_of(failed.called.values()).type,
        **_parts_of(failed, ("step", "rank", "scale", *_NAMES)),
    }


def _contents(failed: FailedStep) -> dict[str, Any]:
    kept = failed.kept
    losses = {}
    for number, loss in kept.losses.items():
        nodes = [(node.name, node.readable_values(), node.made_of) for node in loss.nodes]
        losses[number] = (loss.value, nodes)
    return {
        **_parts_of(kept, _COUNTS),
        "losses": losses,
        "calls": [_call_for_file(call) for call in kept.calls],
        "weights": _weights_for_file(failed.called),
        "trees": {name: repr(module) for name, module in failed.called.items()},
    }


def _parts_of(value: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _weights_for_file(called: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]] | None:
    """Return parameters and buffers by name of each called module, ``None`` if they are too large for a file."""
    weights = {}
    size = 0
    for name, module in called.items():
        weights[name] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        size += sum(tensor.nbytes for tensor in weights[name].values())
    if size > MAX_BYTES:
        return None
    return weights


def _call_for_file(call: KeptCall) -> dict[str, Any]:
    random = call.random
    training = {}
    module = call.module()
    if module is not None:
        for name, inner in module.named_modules():
            training[name] = inner.training
    return {
        **_parts_of(call, ("name", "autocast", *_CALL_PARTS)),
        "random": (random.torch, random.python, random.numpy),
        "training": training,
    }


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
    # `torch.save` writes whole storages.
    if part.layout == torch.strided and part.nbytes != part.untyped_storage().nbytes():
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
        if value is not None and value.dim():
            raise ValueError("a loss is one number")
        loss_nodes = [LossNode(str(name), saved, made_of) for name, saved, made_of in nodes]
        losses[int(number)] = KeptLoss(value, loss_nodes)
    scale = document["scale"]
    if scale is not None:
        scale = float(scale)
    counts: dict[str, Any] = {part: int(document[part]) for part in _COUNTS}
    kept = KeptStep(calls, losses, **counts)
    names: dict[str, Any] = {part: tuple(document[part]) for part in _NAMES}
    failed = FailedStep(kept, int(document["step"]), int(document["rank"]), scale, **names)
    return failed, tuple(dict.fromkeys(doubts))


def _call_in(
    document: Mapping[str, Any], entry: Mapping[str, Any], module: nn.Module, device: str
) -> KeptCall:
    """Return a call for this device: a bundle may come from a device of another kind."""
    states, *host = entry["random"]
    states_here = {}
    for name, state in states.items():
        if torch.device(name).type in ("cpu", device):
            states_here[name] = state.cpu()
    autocast = {**entry["autocast"]}
    if document["device"] in autocast:
        autocast[device] = autocast.pop(document["device"])
    weights = {}
    if document["weights"]:
        weights = document["weights"][entry["name"]]
    return KeptCall(
        module=lambda: module,
        name=entry["name"],
        random=RandomState(states_here, *host),
        autocast=autocast,
        weights=weights,
        training=entry["training"],
        **{part: entry[part] for part in _CALL_PARTS},
    )
