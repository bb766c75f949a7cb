"""Weights & Biases, by its own client."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from gradsurgeon._libraries import library
from gradsurgeon.sinks.sink import Client

_STEP = "gradsurgeon/step"
_BLOCK = bytes(4096)


class WandB(Client):
    """Logs to a run of Weights & Biases.

    Without `run` it makes one of its own: the client counts the calls of a run as steps, and a script that
    gives steps by hand would lose those that ours have overtaken. Curves are drawn over `gradsurgeon/step`.

    Args:
        project: the project of the run that is made.
        run: a run of the script to log to in its place; its steps are then counted by all calls together.
        names: patterns, as in rule files, of tensors that get a curve each besides.
        **options: further arguments of ``wandb.init``.

    Raises:
        GradSurgeonError: the package wandb is missing.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        names: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(names)
        self._wandb: Any = library("wandb", "wandb", "the sink WandB")
        self._given = run
        self._options = {
            "project": project,
            "job_type": "gradsurgeon",
            "reinit": "create_new",
            **options,
        }
        self._open_first()

    def _open(self) -> Any:
        run = self._wandb.init(**self._options) if self._given is None else self._given
        run.define_metric(_STEP, hidden=True)
        run.define_metric("gradsurgeon/*", step_metric=_STEP)
        return run

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._client.log({_STEP: step, **values})

    def histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        drawn = self._wandb.Histogram(np_histogram=(list(counts), list(edges)))
        self._client.log({_STEP: step, name: drawn})

    def text(self, step: int, name: str, text: str) -> None:
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        page = self._wandb.Html(f"<pre>{escaped}</pre>", inject=False)
        self._client.log({_STEP: step, name: page})

    def flush(self) -> None:
        """See whether what is logged can be kept; the client writes and sends by itself.

        It says nothing of a disk that is full, on which a run without a network loses everything.

        Raises:
            OSError: nothing can be written.
        """
        run = self._client
        if getattr(run, "offline", False):
            with tempfile.TemporaryFile(dir=run.dir) as file:
                file.write(_BLOCK)

    def close(self) -> None:
        if self._given is None and self._opened is not None:
            self._opened.finish()

    def close_at_exit(self, _error: BaseException | None) -> None:
        """Leave it to the client, which knows with what status the process ends."""
