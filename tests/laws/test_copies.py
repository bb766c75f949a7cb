"""P7 and the end of a session: copies carry nothing, and whatever was used is freed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import TIMEOUT
from laws import spawned
from models import data, same
from pairs import singly
from ranks import Json
from small import equal, fields_of, fired, net, rule_file, sgd, take_step, weights_of
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel

import gradsurgeon
from gradsurgeon import GradSurgeonError, GradSurgeonWarning, Session
from gradsurgeon.runtime import SessionOptions, registry

PARAMS: list[Json] = [
    {"id": "half", "action": "scale", "factor": 0.5, "params": "*"},
    {"id": "bound", "action": "clamp", "at": "step", "min": -0.1, "max": 0.1, "params": "*"},
    {"id": "norms", "action": "norm-log", "params": "*"},
    {"id": "trap", "action": "nan-trap", "then": "skip-step", "params": "*"},
    {"id": "spikes", "action": "spike-trap", "above": {"times": 9}, "params": "*"},
]
MODULES: list[Json] = [
    {"id": "out", "action": "scale", "factor": 0.5, "modules": "0", "tensor": "output.grad"},
    {"id": "value", "action": "clamp", "max": 0.1, "modules": "0", "tensor": "output"},
    {"id": "in", "action": "norm-log", "modules": "2", "tensor": "input.grad"},
    {"id": "kept", "action": "capture", "modules": "2", "tensor": "input"},
]
RULES = {"params": PARAMS, "modules": MODULES, "params and modules": [*PARAMS, *MODULES]}


def rules(entries: list[Json]) -> Json:
    return rule_file(*entries)


def train(model: Any, steps: int = 2) -> list[Tensor]:
    optimizer = sgd(model)
    for number in range(steps):
        take_step(optimizer, model(data(number, 5, 4)).square().mean())
    return weights_of(model)


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: Any) -> Any:
    def newest(_average: Tensor, weight: Tensor, _count: Tensor | int) -> Tensor:
        return weight.clone()

    average: Any = AveragedModel(model, avg_fn=newest)
    for _ in range(2):
        average.update_parameters(model)
    return average


def restored(model: Any) -> Any:
    fresh = net()
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    return fresh


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a deepcopy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
    "AveragedModel": averaged,
    "state_dict": restored,
}


@singly(kind=RULES, name=COPIES)
def test_a_copy_trains_as_if_there_were_no_rules(name: str, kind: str) -> None:
    model = net()
    with gradsurgeon.apply(model, rules(RULES[kind])) as session:
        train(model)
        before = fired(session)
        made = COPIES[name](model)
        plain = net()
        plain.load_state_dict(model.state_dict())
        found, wanted = train(made, steps=3), train(plain, steps=3)
        assert same(found, wanted)
        assert fired(session) == before
        assert session.step == 2
        assert tables(getattr(made, "module", made)) == tables(net())
        for param in made.parameters():
            assert not param._backward_hooks
            assert not param._post_accumulate_grad_hooks
        # The original is as much under its rules as before.
        train(model, steps=1)
        assert all(one.fired > before[rule] for rule, one in session.status().items())
    assert session.events == []


TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def tables(model: Any) -> dict[str, tuple[type, list[Any], Json]]:
    """What stands in the tables of hooks: their type, their entries, and what is on themselves."""
    return {
        f"{name}.{table}": (type(found), list(found.values()), vars(found))
        for name, module in model.named_modules()
        for table in TABLES
        for found in [getattr(module, table)]
    }


def shift(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output + 1


def bend(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (args[0] * 2,), kwargs


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_the_hooks_of_the_script_and_no_others(how: str) -> None:
    model, plain = net(), net()
    for one in (model, plain):
        one[0].register_forward_hook(shift)
    x = data(0, 3, 4)
    with gradsurgeon.apply(model, rules([{**MODULES[2], "modules": "*"}])):
        for one in (model, plain):
            one[2].register_forward_pre_hook(bend, with_kwargs=True)
        made, wanted = COPIES[how](model), COPIES[how](plain)
        assert tables(made) == tables(wanted)
        assert torch.equal(made(x), plain(x))
        # Numbers of hooks go on from those that the tables had.
        made[0].register_forward_hook(shift)
        assert not torch.equal(made(x), plain(x))


def test_a_model_with_rules_is_pickled_to_the_same_bytes_as_without() -> None:
    model = net()
    wanted = pickle.dumps(model)
    session = gradsurgeon.apply(model, rules(MODULES))
    beside = gradsurgeon.api.attach(
        model, gradsurgeon.plan(model, rules(MODULES)), SessionOptions(beside=True)
    )
    assert pickle.dumps(model) == wanted
    beside.remove()
    assert pickle.dumps(model) == wanted
    session.remove()
    assert pickle.dumps(model) == wanted
    assert tables(model) == tables(net())


def test_a_script_that_cleared_the_tables_can_still_copy_and_remove() -> None:
    model = net()
    session = gradsurgeon.apply(model, rules(MODULES))
    model[0]._forward_hooks.clear()
    model[2]._forward_pre_hooks = OrderedDict()
    assert tables(copy.deepcopy(model)) == tables(net())
    session.remove()
    assert tables(model) == tables(net())


class Keeps(nn.Module):
    """A module that keeps its session, as a LightningModule may."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        entry = [{**MODULES[0], "modules": "fc"}, PARAMS[2]]
        self.session: Session | None = gradsurgeon.apply(self, rules(entry))

    def forward(self, x: Tensor) -> Any:
        return self.fc(x)


@singly(removed=[False, True], name=[name for name in COPIES if name != "state_dict"])
def test_a_session_on_its_model_is_none_on_copies(name: str, removed: bool) -> None:
    model = Keeps()
    session = model.session
    assert session is not None
    train(model)
    if removed:
        session.remove()
    made = COPIES[name](model)
    assert getattr(made, "module", made).session is None
    assert b"gradsurgeon" not in pickle.dumps(session)
    train(made)
    assert model.session is session
    assert session.step == 2
    train(model)
    assert session.status()["norms"].fired == (4 if removed else 8)
    gradsurgeon.remove(model)
    made.session = gradsurgeon.apply(made, rules([PARAMS[2]]))
    train(made)
    assert made.session.status()["norms"].fired == 4
    gradsurgeon.remove(made)


def norms_without_rules() -> list[float]:
    model = net()
    model(torch.ones(3, 4)).sum().backward()
    return [round(param.grad.norm().item(), 5) for param in model.parameters()]


@pytest.mark.slow
def test_saved_models_load_where_gradsurgeon_is_not_installed(tmp_path: Path) -> None:
    paths = [tmp_path / "model.pt", tmp_path / "model.pickle"]
    model = net()
    with gradsurgeon.apply(model, rules(RULES["params and modules"])):
        torch.save(model, paths[0])
        paths[1].write_bytes(pickle.dumps(model))
    done = subprocess.run(
        [sys.executable, "-c", spawned.SAVED, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    # The first of them has been loaded with ``weights_only=True`` as well.
    assert done.stdout.splitlines() == [str(norms_without_rules())] * 3


@pytest.mark.slow
def test_a_model_as_argument_of_a_spawned_process_comes_without_rules() -> None:
    model = net()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with gradsurgeon.apply(model, rules(RULES["params and modules"])) as session:
        # torch would warn of each hook that stays behind, were ours not marked.
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            child = context.Process(target=spawned.report, args=(model, queue))
            child.start()
        found = queue.get()
        child.join(60)
        assert child.exitcode == 0
        train(model, steps=1)
        assert session.status()["half"].fired == 4
    assert [str(one.message) for one in said if "hook" in str(one.message)] == []
    assert found == (norms_without_rules(), False, False)


# --- nothing is kept alive ------------------------------------------------------------------------


def step(model: Any, optimizer: Any, x: Tensor | None = None) -> None:
    take_step(optimizer, model(data(0, 5, 4) if x is None else x).square().mean())


def by_training(model: Any, session: Any) -> None:
    train(model)


def by_removal(model: Any, session: Any) -> None:
    train(model)
    session.remove()


def by_pausing(model: Any, session: Any) -> None:
    session.pause()
    train(model)


def by_a_closure(model: Any, session: Any) -> None:
    optimizer: Any = sgd(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(data(0, 5, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def by_a_scaler(model: Any, session: Any) -> None:
    scaler, optimizer = GradScaler("cpu"), sgd(model)
    scaler.scale(model(data(0, 5, 4)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def by_ticks(model: Any, session: Any) -> None:
    model(data(0, 5, 4)).square().mean().backward()
    session.tick()


def by_skipping(model: Any, session: Any) -> None:
    step(model, sgd(model), data(0, 5, 4) * float("nan"))
    assert any(event.kind == "skipped-step" for event in session.events)


def by_asking(model: Any, session: Any) -> None:
    torch.autograd.grad(model(data(0, 5, 4)).square().mean(), list(model.parameters()))


def by_validation(model: Any, session: Any) -> None:
    with torch.inference_mode():
        model(data(0, 5, 4))
    # A forward pass that no backward pass follows.
    model(data(0, 5, 4))


def by_a_graph_that_stays(model: Any, session: Any) -> None:
    loss = model(data(0, 5, 4)).square().mean()
    # torch warns of this once in a process, and another test waits for it.
    torch.set_warn_always(True)
    try:
        loss.backward(create_graph=True)
    finally:
        torch.set_warn_always(False)
    model.zero_grad()


def by_copying(model: Any, session: Any) -> None:
    train(copy.deepcopy(model))


def by_looking(model: Any, session: Any) -> None:
    train(model)
    assert session.status()
    assert session._attachment.records
    assert str(session.plan)


WAYS = [
    by_training,
    by_removal,
    by_pausing,
    by_a_closure,
    by_a_scaler,
    by_ticks,
    by_skipping,
    by_asking,
    by_validation,
    by_a_graph_that_stays,
    by_copying,
    by_looking,
]


def ends(way: Callable[[Any, Any], None], **options: Any) -> list[Any]:
    """Use a model in some way; return weak references to it, its modules and its session."""
    model = net()
    session = gradsurgeon.apply(model, rules(RULES["params and modules"]), **options)
    way(model, session)
    return [weakref.ref(one) for one in (model, *model.modules(), *model.parameters(), session)]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__.replace("_", " ") for way in WAYS])
def test_model_and_session_are_freed_after_use(way: Callable[[Any, Any], None]) -> None:
    gone = ends(way)
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


def test_a_run_directory_keeps_nothing_alive(tmp_path: Path) -> None:
    gone = ends(by_training, record=tmp_path / "run")
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
    run = gradsurgeon.open_run(tmp_path / "run")
    assert run.states == {0: "finished"}
    assert len(run.history("0.weight", rule="norms")) == 2
    assert not registry._watching


TO_PARTS = """
version: 1
rules:
  - {id: still, action: zero, params: "first.*", at: step}
  - {id: norms, action: norm-log, params: "*"}
  - {id: half, action: scale, modules: second.0, tensor: output.grad, factor: 0.5}
"""


def in_a_container(parts: Mapping[str, Any], **options: Any) -> Session:
    """Apply rules to several models in a container that is made for that alone."""
    return gradsurgeon.apply(nn.ModuleDict(parts), TO_PARTS, **options)


GONE = pytest.mark.filterwarnings("ignore:.*is gone, but parts of it live on")


@pytest.mark.parametrize("kept", [False, True])
def test_a_container_that_is_made_for_the_rules_alone_may_go(kept: bool, tmp_path: Path) -> None:
    def go() -> None:
        first, second = net(), net()
        session = in_a_container({"first": first, "second": second}, record=tmp_path / "run")
        gc.collect()
        if not kept:
            del session
        before = weights_of(first)
        with pytest.warns(
            GradSurgeonWarning,
            match="is gone, but parts of it live on: keep a reference to it",
        ):
            train(first)
        train(second)
        assert equal(before, first.parameters())

    go()
    gc.collect()
    run = gradsurgeon.open_run(tmp_path / "run")
    assert run.states == {0: "finished"}
    assert len(run.history("first.0.weight", rule="norms")) == 2
    assert len(run.history("second.0.weight", rule="norms")) == 2
    assert {status.fired for status in run.status().values()} == {8, 16, 2}
    assert not registry._watching


@GONE
def test_a_container_that_is_made_once_more_has_the_rules_of_the_first_one() -> None:
    parts = {"first": net(), "second": net()}
    in_a_container(parts)
    with pytest.raises(GradSurgeonError, match="already applied to this model or its modules"):
        in_a_container(parts)
    session = in_a_container(parts, replace=True)
    train(parts["second"])
    assert session.status()["half"].fired == 2
    gradsurgeon.remove(nn.ModuleDict(parts))
    assert not registry._watching


@GONE
def test_a_submodule_that_outlives_its_model_keeps_the_rules() -> None:
    model = net()
    session = gradsurgeon.apply(model, rules([PARAMS[2]]))
    rest, other = model[0], weakref.ref(model[2])
    del model
    gc.collect()
    assert other() is None
    rest(data(0, 5, 4)).sum().backward()
    assert session.status()["norms"].fired
    lost = fields_of(session, "name", kind="hook-lost")
    assert not lost, "the module is gone with them"
    weight = weakref.ref(rest.weight)
    session.remove()
    assert not registry._watching
    gone = weakref.ref(session._attachment)
    del session, rest
    gc.collect()
    assert gone() is weight() is None


def test_an_optimizer_that_outlives_its_model_keeps_weights_and_nothing_else() -> None:
    kept: list[Any] = []

    def way(model: Any, session: Any) -> None:
        kept.append(sgd(model))
        step(model, kept[0])

    gone = ends(way)
    gc.collect()
    assert sum(one() is not None for one in gone) == 4
    assert not kept[0]._optimizer_step_pre_hooks
    kept.clear()
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


def test_a_step_that_failed_keeps_nothing_alive_once_another_model_trains() -> None:
    def fault(*_: object) -> None:
        raise MemoryError("no room")

    def way(model: Any, session: Any) -> None:
        optimizer = sgd(model)
        step(model, optimizer)
        optimizer.register_step_pre_hook(fault)
        with pytest.raises(MemoryError):
            step(model, optimizer)

    gone = ends(way)
    # Its size has been reduced, as people do when the memory is full.
    model = net()
    step(model, sgd(model))
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


@GONE
def test_a_part_that_has_lost_a_parameter_itself_is_told_of_it() -> None:
    model = net()
    session = gradsurgeon.apply(model, rules([PARAMS[2]]))
    rest = model[0]
    del model
    gc.collect()
    rest.bias = None
    with pytest.warns(GradSurgeonWarning, match="0.bias was replaced, renamed, taken out"):
        train(rest)
    assert fields_of(session, "name", kind="hook-lost") == ["0.bias"]
    session.remove()


@GONE
@pytest.mark.parametrize("kept", ["embedding", "head"])
def test_a_tied_weight_is_found_in_the_part_that_is_left(kept: str) -> None:
    parts: Json = {"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)}
    parts["head"].weight = parts["embedding"].weight
    model = nn.ModuleDict(parts)
    rule = {"id": "ten", "action": "scale", "params": "*", "at": "backward", "factor": 10.0}
    session = gradsurgeon.apply(model, rules([rule]))
    part = parts.pop(kept)
    parts.clear()
    del model
    gc.collect()
    part(torch.ones(1, 2) if kept == "head" else torch.tensor([0, 1, 2])).sum().backward()
    assert torch.equal(part.weight.grad, torch.full((3, 2), 10.0))
    session.remove()
    assert not registry._watching
