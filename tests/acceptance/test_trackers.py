"""Sinks as the trackers themselves read them back: TensorBoard, Weights & Biases, MLflow, all without a network."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import TIMEOUT
from commands import environment
from ranks import Json
from small import kinds_of, rule_file, sgd, take_step, tanh_net

import gradsurgeon
from gradsurgeon import Session, sinks
from gradsurgeon.records import delivery

pytestmark = [
    pytest.mark.slow,
    # Of the clients' own making.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

STEPS, BAD = 40, 25
TOTAL, TRAP = "gradsurgeon/norms/total", "gradsurgeon/events/trap"
RULES = rule_file(
    {"id": "norms", "action": "norm-log", "params": "*"},
    {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"},
)


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database of MLflow, which takes seconds to be made."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    path = tmp_path_factory.mktemp("store") / "runs.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def uri(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an address of a database of its own, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{shutil.copy(empty_store, tmp_path)}"


@pytest.fixture(autouse=True)
def all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step of a fast training stand for others."""
    monkeypatch.setattr(delivery, "_MOST_ROWS", 600)


def train(*given: sinks.Sink) -> Session:
    torch.manual_seed(0)
    model = tanh_net(4, 8, 2)
    optimizer = sgd(model)
    with gradsurgeon.apply(model, RULES, sinks=given) as session:
        for step in range(STEPS):
            x = torch.randn(16, 4)
            if step == BAD:
                x[0, 0] = float("nan")
            take_step(optimizer, (model(x) - x[:, :2]).square().mean())
    assert kinds_of(session) == ["trap", "skipped-step"]
    return session


def whole(session: Session) -> dict[int, float]:
    """Return the norm over all parameters in the steps in which it is finite."""
    names = [param.name for param in session.plan.manifest.params]
    rows = zip(*(session.history(name) for name in names), strict=True)
    norms = {row[0][0]: torch.tensor([value for _, value in row]).norm().item() for row in rows}
    assert len(norms) == STEPS
    return {step: norm for step, norm in norms.items() if step != BAD}


def test_tensorboard(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    session = train(sinks.TensorBoard(tmp_path, names=["2.bias"]))
    everything = {"scalars": 0, "tensors": 0}
    found = reader.EventAccumulator(str(tmp_path), size_guidance=everything).Reload()
    scalars = {
        name: {one.step: one.value for one in found.Scalars(name)}
        for name in found.Tags()["scalars"]
    }
    finite = {step: value for step, value in scalars[TOTAL].items() if step != BAD}
    assert finite == pytest.approx(whole(session), rel=1e-5)
    assert scalars["gradsurgeon/norms/2.bias/l2"][3] == pytest.approx(
        session.history("2.bias")[3][1]
    )
    assert scalars[TRAP] == {BAD: 1.0}
    # Neither the number of parameters nor that of steps makes more curves.
    assert len(scalars) == 5 + 1 + 2 + 2
    assert scalars["gradsurgeon/norms/loss/loss"].keys() == scalars[TOTAL].keys()
    (text,) = found.Tensors(f"{TRAP}/message/text_summary")
    told = text.tensor_proto.string_val[0].decode()
    assert told.replace("    ", "", 1).replace("\n    ", "\n") == session.events[0].message
    assert "diagnosis (reproduced): the input of the root" in told


def test_mlflow(tmp_path: Path, uri: str) -> None:
    import mlflow

    sink = sinks.MLflow(uri, experiment="surgery")
    session = train(sink)
    sink.close()
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("surgery").experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, TOTAL)
    finite = {one.step: one.value for one in history if one.step != BAD}
    assert finite == pytest.approx(whole(session), rel=1e-5)
    assert run.data.metrics[TRAP] == 1.0
    path = client.download_artifacts(
        run.info.run_id, f"{TRAP}/message/step-{BAD}.txt", str(tmp_path)
    )
    assert Path(path).read_text(encoding="utf-8") == session.events[0].message


def artifacts(client: Any, run: str, path: str | None = None) -> list[str]:
    found = client.list_artifacts(run, path)
    return [
        name
        for one in found
        for name in (artifacts(client, run, one.path) if one.is_dir else [one.path])
    ]


@pytest.mark.parametrize(("error", "status"), [(None, "FINISHED"), (ValueError(), "FAILED")])
def test_mlflow_keeps_each_text_and_how_it_has_ended(
    uri: str, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, status: str
) -> None:
    import mlflow

    sink = sinks.MLflow(uri)
    for text in ("one", "two"):
        sink.text(3, "gradsurgeon/events/trap/message", text)
    if error is not None:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    sink.close()
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs(["0"])
    assert run.info.status == status
    paths = sorted(artifacts(client, run.info.run_id))
    assert paths == [f"{TRAP}/message/step-3{more}.txt" for more in ("-2", "")]


def test_a_rank_that_sends_nothing_opens_nothing(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("RANK", "1")
    board, tracker = sinks.TensorBoard(tmp_path / "board"), sinks.MLflow(uri)
    for sink in (board, tracker):
        sink.close()
    assert not (tmp_path / "board").exists()
    client = mlflow.MlflowClient(uri)
    assert client.search_runs(["0"]) == []
    # One that is used after all is like any other.
    tracker.scalars(0, {"a": 1.0})
    tracker.close()
    (run,) = client.search_runs(["0"])
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"a": 1.0})


def test_mlflow_joins_the_run_that_is_active(uri: str) -> None:
    import mlflow

    mlflow.set_tracking_uri(uri)
    try:
        with mlflow.start_run() as active:
            train(sinks.MLflow())
            mlflow.log_metric("accuracy", 0.5)
        run = mlflow.get_run(active.info.run_id)
    finally:
        mlflow.set_tracking_uri(None)
    assert {"accuracy", TOTAL, TRAP} <= run.data.metrics.keys()


def _records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file of W&B, which are those of a log of LevelDB: in blocks of 32 KiB, in parts."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


# The mode is given as an argument: the client reads its variables once in a process.
def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    sink = sinks.WandB("surgery", dir=str(tmp_path), mode="offline")
    session = train(sink)
    sink.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows: list[Json] = []
    metrics = {}
    # The process of the client writes the last block after it has said that it is done.
    end = time.monotonic() + TIMEOUT
    while not (found := [*map(records.Record.FromString, _records(file))])[-1].HasField("exit"):
        assert time.monotonic() < end
        time.sleep(0.1)
    for record in found:
        if record.HasField("history"):
            items = record.history.item
            rows.append(
                {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items}
            )
        elif record.HasField("metric"):
            metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    assert metrics["gradsurgeon/*"] == "gradsurgeon/step"
    totals = {row["gradsurgeon/step"]: row[TOTAL] for row in rows if TOTAL in row}
    assert set(totals) == set(range(STEPS))
    finite = {step: value for step, value in totals.items() if step != BAD}
    assert finite == pytest.approx(whole(session), rel=1e-5)
    # A value of several parts has a key for each.
    (panel,) = [row[f"{TRAP}/message/path"] for row in rows if f"{TRAP}/message/path" in row]
    (place,) = tmp_path.glob(f"wandb/offline-run-*/files/{panel}")
    html = place.read_text(encoding="utf-8")
    assert "diagnosis (reproduced)" in html


def test_wandb_has_the_status_with_which_the_process_ends(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    code = (
        "import gradsurgeon, sys, torch\n"
        "from gradsurgeon import sinks\n"
        "model = torch.nn.Linear(2, 1)\n"
        "rules = 'version: 1\\nrules: [{id: norms, action: norm-log, params: \"*\"}]\\n'\n"
        "tracker = sinks.WandB('surgery', dir='.', mode='offline', settings={'silent': True})\n"
        "gradsurgeon.apply(model, rules, sinks=[tracker])\n"
        "sys.exit(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        # The client would use the service of this process.
        env={name: value for name, value in environment().items() if "WANDB" not in name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = map(records.Record.FromString, _records(file))
    assert [one.exit.exit_code for one in found if one.HasField("exit")] == [3]


def test_wandb_leaves_the_steps_of_a_run_of_the_script_alone(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(project="theirs", dir=str(tmp_path), mode="offline") as theirs:
        train(sinks.WandB("surgery", dir=str(tmp_path), mode="offline"))
        assert wandb.run is theirs
        theirs.log({"loss": 0.5}, step=3)
        theirs.log({"loss": 0.25}, step=4)
        theirs.log({}, step=5)
        assert theirs.summary["loss"] == 0.25
