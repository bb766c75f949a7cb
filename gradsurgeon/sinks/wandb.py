"""Weights & Biases, by its own client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradsurgeon._libraries import library

_STEP = "gradsurgeon/step"


class WandB:
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
        wandb = library("wandb", "wandb", "the sink WandB")
        self.names = tuple(names)
        self._wandb: Any = wandb
        self._is_ours = run is None
        if run is None:
            given = {"job_type": "gradsurgeon", "reinit": "create_new", **options}
            run = wandb.init(project=project, **given)
        self._run = run
        run.define_metric(_STEP, hidden=True)
        run.define_metric("gradsurgeon/*", step_metric=_STEP)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({_STEP: step, **values})

    def histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        drawn = self._wandb.Histogram(np_histogram=(list(counts), list(edges)))
        self._run.log({_STEP: step, name: drawn})

    def text(self, step: int, name: str, text: str) -> None:
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        page = self._wandb.Html(f"<pre>{escaped}</pre>", inject=False)
        self._run.log({_STEP: step, name: page})

    def flush(self) -> None:
        """Do nothing: the client sends by itself."""

    def close(self) -> None:
        if self._is_ours:
            self._run.finish()
