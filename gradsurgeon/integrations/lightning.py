"""Rules in the trainer of Lightning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradsurgeon.api import Rules
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.integrations.applied import Applied

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from gradsurgeon.session import Session

_CHECKPOINT = "gradsurgeon"


def _lightning() -> Any:
    """Return the package that the script uses, under the one or the other of its names."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name not in (name, name.partition(".")[0]):
                raise
    raise GradSurgeonError(
        "LightningCallback needs Lightning, which is not installed: "
        "pip install 'gradsurgeon[lightning]'"
    )


_pl = _lightning()
if not TYPE_CHECKING:
    Callback = _pl.Callback


class LightningCallback(Callback):
    """Applies rules while ``Trainer.fit`` trains: ``Trainer(callbacks=[LightningCallback("rules.yaml")])``.

    The rules name parameters as the ``state_dict()`` of the `LightningModule` does. They act from the first training
    step, after a checkpoint was restored, until `fit` ends or raises; the sanity check before it runs without. A
    checkpoint has what the rules have learnt, and they go on from there; where one has nothing of it, a warning says so.
    The plan goes to the log of the trainer, and every ``log_every_n_steps`` steps its loggers get
    of each rule that records norms the norm of all tensors together, their median and how many are not
    finite, ``gradsurgeon/<rule>/total``, ``median`` and ``not finite``; and how many events of each kind there
    were, ``gradsurgeon/events/<kind>``. They are those of the first rank. The diagnosis of a trap needs a
    ``training_step`` that calls ``self(batch)``, not only parts of the module.

    Args:
        rules: whatever `gradsurgeon.load` takes.
        names: patterns, as in rule files, of tensors that get a curve each besides.
        **options: further options of `gradsurgeon.apply`, but for `start_step`, which is the trainer's.

    Attributes:
        session: the session of the last `fit`, whose records stay readable; ``None`` before.

    Raises:
        RuleFileError: the rules are not valid.
        GradSurgeonError: Lightning is not installed.
    """

    def __init__(self, rules: Rules, *, names: Sequence[str] = (), **options: Any) -> None:
        super().__init__()
        self._applied = Applied(rules, names, options)
        # How many steps the trainer had counted, which adds up several optimizers, and what the rules knew.
        self._kept: dict[str, Any] = {"trainer": 0, "session": None}
        # An update of this batch has begun.
        self._updating = False

    @property
    def session(self) -> Session | None:
        return self._applied.session

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        kept, step = self._kept, int(trainer.global_step)
        session = self._applied.begin(pl_module, step)
        if kept["trainer"] == step and kept["session"] is not None:
            session.load_state_dict(kept["session"])
        elif step:
            self._applied.begins_anew("the checkpoint was written without this callback")
        if (
            trainer.gradient_clip_algorithm != "value"
        ):  # which leaves norms as different as they were
            self._applied.warn_of_clip(trainer.gradient_clip_val, "leave gradient_clip_val out")
        _pl.utilities.rank_zero_info(str(session.plan))

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._updating = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._updating = False
        # As Lightning itself asks for its own metrics, and with the step that these have.
        if not trainer._logger_connector.should_update_logs:  # noqa: SLF001 # there is no other way
            return
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():  # noqa: SLF001 # the same
            return
        self._log(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped)  # noqa: SLF001 # the same

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self._end(trainer)
        self._applied.end()

    def on_exception(self, trainer: Any, *_: Any) -> None:
        if self.session is not None:
            self._end(trainer)
            self._applied.end(log_raised=True)

    def on_save_checkpoint(self, trainer: Any, _pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._keep(trainer)
        checkpoint[_CHECKPOINT] = self._kept

    def on_load_checkpoint(
        self, _trainer: Any, _pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._kept = checkpoint.get(_CHECKPOINT, self._kept)

    def _keep(self, trainer: Any) -> None:
        if self.session is not None:
            state = self.session.state_dict()
            self._kept = {"trainer": int(trainer.global_step), "session": state}

    def _end(self, trainer: Any) -> None:
        self._keep(trainer)
        # A batch is counted at its end, which one that has raised does not come to.
        stepped = trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001 # as above
        self._log(trainer, stepped if self._updating else max(0, stepped - 1))
        self._updating = False

    def _log(self, trainer: Any, step: int) -> None:
        if trainer.is_global_zero and trainer.loggers and (metrics := self._applied.metrics()):
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
