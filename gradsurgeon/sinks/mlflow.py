"""MLflow, by its own client."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gradsurgeon._libraries import library

# What a server takes at once, and of which letters a name is made.
_MOST = 1000
_OTHERS = re.compile(r"[^\w\-. /]")


class MLflow:
    """Logs metrics and texts to a run of MLflow: the one that is active, or else a new one.

    It has no histograms of its own; texts are artifacts of the run.

    Args:
        tracking_uri: the server or the database, as ``mlflow.set_tracking_uri`` takes it; without it the one in use.
        experiment: the name of the experiment that a new run belongs to; it is made if need be.
        run_id: a run to log to.
        names: patterns, as in rule files, of tensors that get a curve each besides.

    Raises:
        GradSurgeonError: the package mlflow is missing.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str | None = None,
        run_id: str | None = None,
        names: Sequence[str] = (),
    ) -> None:
        mlflow = library("mlflow", "mlflow", "the sink MLflow")
        self.names = tuple(names)
        self._metric: Any = mlflow.entities.Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri)
        self._waiting: list[Any] = []
        active = mlflow.active_run() if tracking_uri is None else None
        self._is_ours = run_id is None and active is None
        if run_id is None:
            run_id = active.info.run_id if active is not None else self._new_run(experiment)
        self._run_id = run_id

    def _new_run(self, experiment: str | None) -> str:
        name = experiment or "Default"
        known = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if known is None else known.experiment_id
        return str(self._client.create_run(number, run_name="gradsurgeon").info.run_id)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waiting += [
            self._metric(_name(name), value, now, step) for name, value in values.items()
        ]

    def histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        """Do nothing: a run of MLflow has none."""

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._run_id, text, f"{_name(name)}/step-{step}.txt")

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), _MOST):
            self._client.log_batch(self._run_id, metrics=waiting[start : start + _MOST])

    def close(self) -> None:
        self.flush()
        ours, self._is_ours = self._is_ours, False
        if ours:
            self._client.set_terminated(self._run_id)


def _name(name: str) -> str:
    return _OTHERS.sub("_", name)
