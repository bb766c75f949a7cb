"""MLflow, by its own client."""

import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradsurgeon.sinks.sink import Client

# A server accepts so many metrics at once, and no other characters in a name.
_MOST = 1000
_OTHERS = re.compile(r"[^\w\-. /]")


class MLflow(Client):
    """Logs metrics and texts to a run of MLflow: the active run, or else a new run.

    Texts are artifacts of the run.

    Args:
        tracking_uri: the server or the database, as for ``mlflow.set_tracking_uri``; by default the current one.
        experiment: the name of the experiment that a new run belongs to; it is created if need be.
        run_id: a run to log to.
        names: patterns, as in rule files, of further tensors that get a curve each.

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
        super().__init__(names, "mlflow", "mlflow")
        self._tracking_uri = tracking_uri
        self._experiment = experiment or "Default"
        # MLflow has an active run per thread, and the sink works on another thread.
        active = self._library.active_run() if tracking_uri is None else None
        self._run_id = active.info.run_id if run_id is None and active is not None else run_id
        self._is_ours = self._run_id is None
        self._waiting: list[Any] = []
        # The number of texts per name and step.
        self._texts: Counter[str] = Counter()
        self._open_first()

    def _open(self) -> Any:
        client = self._library.MlflowClient(self._tracking_uri)
        if self._run_id is None:
            known = client.get_experiment_by_name(self._experiment)
            number = known.experiment_id if known else client.create_experiment(self._experiment)
            self._run_id = str(client.create_run(number, run_name="gradsurgeon").info.run_id)
        return client

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metric = self._library.entities.Metric
        self._waiting += [metric(_name(name), value, now, step) for name, value in values.items()]

    def text(self, step: int, name: str, text: str) -> None:
        path = f"{_name(name)}/step-{step}"
        self._texts[path] += 1
        # Another text of the same path would replace it.
        more = f"-{self._texts[path]}" if self._texts[path] > 1 else ""
        client = self._client  # opened first: it may make the run
        client.log_text(self._run_id, text, f"{path}{more}.txt")

    def flush(self) -> None:
        client = self._client
        while self._waiting:
            metrics = self._waiting[:_MOST]
            del self._waiting[:_MOST]
            client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """End the run. An exception that ends the process makes it a failed run."""
        if not self._is_open and not self._waiting:
            return
        ours = self._is_ours
        self._is_ours = False
        try:
            self.flush()
        finally:
            if ours:
                # In a notebook an exception ends only a cell.
                failed = hasattr(sys, "last_value") and not hasattr(sys, "ps1")
                self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _name(name: str) -> str:
    return _OTHERS.sub("_", name)
