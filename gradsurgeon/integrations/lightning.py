"""Rules in Lightning's trainer."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradsurgeon.api import Rules
from gradsurgeon.common._libraries import is_installed, library
from gradsurgeon.integrations.applied import AppliedRules

if TYPE_CHECKING:
    from lightning.pytorch import Callback

_CHECKPOINT = "gradsurgeon"
_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _name_of_lightning() -> str:
    """Return the name by which the script imported Lightning, or else the name of an installed package."""
    for name in _NAMES:
        if sys.modules.get(name):
            return name
    for name in _NAMES:
        if is_installed(name.partition(".")[0]):
            return name
    return _NAMES[0]


_pl = library(_name_of_lightning(), "lightning", "LightningCallback")
if not TYPE_CHECKING:
    Callback = _pl.Callback


class LightningCallback(AppliedRules, Callback):
    """Applies rules while ``Trainer.fit`` trains: ``Trainer(callbacks=[LightningCallback("rules.yaml")])``.

    Rules name parameters as the ``state_dict()`` of the `LightningModule` does. They act from the first training
    step, after a checkpoint is restored, until `fit` ends or raises, but not in the sanity check. Checkpoints hold
    what the rules learnt, and a resumed training loads it; a checkpoint without it causes a warning.

    The plan goes to the trainer's log. Every ``log_every_n_steps`` steps, its loggers get numbers of the first
    rank. For each rule that records norms these are the norm of all tensors together, the median, and the number
    of non-finite norms: ``gradsurgeon/<rule>/total``, ``median`` and ``not finite``. The number of events of each
    kind is ``gradsurgeon/events/<kind>``. The diagnosis of a trap needs a ``training_step`` that calls
    ``self(batch)``, not only parts of the module.

    Args:
        rules: as for `gradsurgeon.load`.
        names: patterns, as in rule files, of tensors that get a curve each.
        **options: further options of `gradsurgeon.apply`, except `start_step`, which the trainer knows.

    Attributes:
        session: the session of the last `fit`, with readable records; ``None`` before.

    Raises:
        RuleFileError: the rules are not valid.
        GradSurgeonError: Lightning is not installed.
    """

    def __init__(self, rules: Rules, *, names: Sequence[str] = (), **options: Any) -> None:
        super().__init__(rules, names=names, **options)
        # The trainer's step count, which adds up several optimizers, and the state of the rules at that step.
        self._kept: dict[str, Any] = {"trainer": 0, "session": None}
        self._updating = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        kept = self._kept
        step = int(trainer.global_step)
        session = self._begin(pl_module, step)
        if kept["trainer"] == step and kept["session"] is not None:
            session.load_state_dict(kept["session"])
        elif step:
            self._warn_of_restart(step, "the checkpoint was written without this callback")
        # Clipping by value leaves norms different from each other.
        if trainer.gradient_clip_algorithm != "value":
            self._warn_of_clip(trainer.gradient_clip_val, "leave gradient_clip_val out")
        _pl.utilities.rank_zero_info(str(session.plan))

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._updating = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._updating = False
        # At the same batches, and with the same step, as Lightning's own metrics.
        if not trainer._logger_connector.should_update_logs:  # noqa: SLF001 # no public name
            return
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():  # noqa: SLF001 # as above
            return
        self._log(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped)  # noqa: SLF001 # as above

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self._log_last(trainer)
        self._end()

    def on_exception(self, trainer: Any, *_: Any) -> None:
        if self.session is not None:
            self._log_last(trainer)
            self._end()

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

    def _log_last(self, trainer: Any) -> None:
        self._keep(trainer)
        # Lightning counts a batch at its end, which a batch that raised does not reach.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001 # as above
        if not self._updating:
            step = max(0, step - 1)
        self._log(trainer, step)
        self._updating = False

    def _log(self, trainer: Any, step: int) -> None:
        if not trainer.is_global_zero or not trainer.loggers:
            return
        metrics = self._metrics()
        if metrics:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
