"""Weights & Biases, by its own client."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradsurgeon.sinks.sink import Client

_STEP = "gradsurgeon/step"


class WandB(Client):
    """Logs to a run of Weights & Biases.

    By default the sink makes a run of its own. The client counts the calls of a run as steps, so a script that
    passes its own steps would lose the steps that our calls have overtaken. Curves are drawn over `gradsurgeon/step`.

    Args:
        project: the project of the new run.
        run: a run of the script to log to instead; all calls together then count its steps.
        names: patterns, as in rule files, of further tensors that get a curve each.
        **options: further arguments of ``wandb.init``.

    Raises:
        GradSurgeonError: the package wandb is missing.
    """

    knows_exit = True  # the client itself ends the run, with the status of the process

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        names: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(names, "wandb", "wandb")
        self._given = run
        self._options = {
            "project": project,
            "job_type": "gradsurgeon",
            "reinit": "create_new",
            **options,
        }
        self._open_first()

    def _open(self) -> Any:
        run = self._library.init(**self._options) if self._given is None else self._given
        run.define_metric(_STEP, hidden=True)
        run.define_metric("gradsurgeon/*", step_metric=_STEP)
        return run

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._client.log({_STEP: step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        page = self._library.Html(f"<pre>{escaped}</pre>", inject=False)
        self._client.log({_STEP: step, name: page})

    def flush(self) -> None:
        """Do nothing: the client writes and sends by itself."""

    def close(self) -> None:
        if self._given is None and self._is_open:
            self._client.finish()
