"""Rules in the `Trainer` of Hugging Face."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from gradsurgeon import _dist
from gradsurgeon.api import Rules
from gradsurgeon.errors import GradSurgeonError, GradSurgeonWarning
from gradsurgeon.integrations.applied import Applied
from gradsurgeon.store.layout import state_name

if TYPE_CHECKING:
    from gradsurgeon.session import Session

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise GradSurgeonError(
        "TransformersCallback needs transformers, which is not installed: "
        "pip install 'gradsurgeon[transformers]'"
    ) from error

# By the model, what is on it: a training that raises tells no callback, and the next one may have another one.
_on: WeakKeyDictionary[Any, Applied] = WeakKeyDictionary()
_NOT_FIRST = (
    "this release of transformers does not show its list of callbacks: the numbers of the rules are in "
    "trainer.state.log_history, but may be missing in TensorBoard and other reporters; pass sinks=[...] to "
    "TransformersCallback to send them there"
)


class TransformersCallback(TrainerCallback):
    """Applies rules while ``Trainer.train`` trains: ``Trainer(..., callbacks=[TransformersCallback("rules.yaml")])``.

    The rules act from the first step, after a checkpoint was restored, until the training ends. The trainer
    tells no callback when it raises: then they stay on the model until its next training begins,
    or `gradsurgeon.remove` is called. Each checkpoint of the trainer has what the rules have learnt, in `state-RANK.pt`,
    and they go on from there. The plan is printed on the first rank. Whatever the trainer logs while it trains,
    on the console, in ``trainer.state.log_history`` and to its reporters, has of each rule that records norms
    the norm of all tensors together, their median and how many are not finite, ``gradsurgeon/<rule>/total``,
    ``median`` and ``not finite``; and how many events of each kind there were, ``gradsurgeon/events/<kind>``.

    Args:
        rules: whatever `gradsurgeon.load` takes.
        names: patterns, as in rule files, of tensors that get a number each besides.
        **options: further options of `gradsurgeon.apply`, but for `start_step`, which is the trainer's.

    Attributes:
        session: the session of the last training, whose records stay readable; ``None`` before.

    Raises:
        RuleFileError: the rules are not valid.
        GradSurgeonError: transformers is not installed.
    """

    def __init__(self, rules: Rules, *, names: Sequence[str] = (), **options: Any) -> None:
        self._applied = Applied(rules, names, options)

    @property
    def session(self) -> Session | None:
        return self._applied.session

    def on_train_begin(self, args: Any, state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        self._come_first()
        if (left := _on.pop(model, None)) is not None:
            left.end(log_raised=True)
        session = self._applied.begin(model, state.global_step)
        self._resume(session, args, state.global_step)
        _on[model] = self._applied
        if state.is_world_process_zero:
            print(session.plan)  # noqa: T201 # as the trainer prints its log

    def _resume(self, session: Session, args: Any, step: int) -> None:
        """Go on from what the rules knew at a checkpoint, where the trainer has restored one of this step."""
        named = args.resume_from_checkpoint
        folders = [Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"]
        if isinstance(named, str) and Path(named).name == folders[0].name:
            folders.insert(0, Path(named))
        paths = [folder / state_name(_dist.rank()) for folder in folders]
        if step and (path := next(filter(Path.is_file, paths), None)) is not None:
            session.load_state_dict(torch.load(path, weights_only=True))

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if self.session is not None and folder.is_dir():
            torch.save(self.session.state_dict(), folder / state_name(_dist.rank()))

    def on_log(
        self, _args: Any, state: Any, _control: Any, logs: dict[str, float], **_: Any
    ) -> None:
        if any(name.startswith("eval_") for name in logs):
            return
        metrics = self._applied.metrics()
        logs.update(metrics)
        # The history has a copy, made just before.
        state.log_history[-1].update(metrics)

    def on_train_end(self, *_: Any, model: Any, **_kwargs: Any) -> None:
        _on.pop(model, None)
        self._applied.end()

    def _come_first(self) -> None:
        """Stand before the reporters, which the trainer puts first: they report what the log holds when they see it.

        No callback is given the list, so that it is taken from the handler that goes through it right now. Nobody is
        left out or called twice: those that come after this one stay where they are.
        """
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # documented
        while frame is not None:
            callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
            if isinstance(callbacks, list) and self in callbacks:
                callbacks.remove(self)
                callbacks.insert(0, self)
                return
            frame = frame.f_back
        warnings.warn(_NOT_FIRST, GradSurgeonWarning, stacklevel=2)
