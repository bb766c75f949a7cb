"""Rules in the `Trainer` of Hugging Face."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from gradsurgeon import _dist
from gradsurgeon.api import Rules
from gradsurgeon.errors import GradSurgeonError, printable, warn
from gradsurgeon.integrations.applied import Applied
from gradsurgeon.runtime import state_file
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
_NOT_TOLD = (
    "this release of transformers does not show which checkpoint it goes on from; give what that has in `state-RANK.pt` to "
    "`callback.session.load_state_dict()` in `on_train_begin` of a callback that comes after this one"
)


class TransformersCallback(TrainerCallback):
    """Applies rules while ``Trainer.train`` trains: ``Trainer(..., callbacks=[TransformersCallback("rules.yaml")])``.

    The rules act from the first step, after a checkpoint was restored, until the training ends. The trainer
    tells no callback when it raises: then they stay on the model until its next training begins,
    or `gradsurgeon.remove` is called. Each checkpoint of the trainer has what the rules have learnt, in `state-RANK.pt`,
    and they go on from the one that the trainer resumes from, wherever it is; where it has none, a warning says so. The plan is printed on the first rank. Whatever the trainer logs while it trains,
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
        try:
            self._resume(session, state.global_step)
        except BaseException:
            self._applied.end(log_raised=True)
            raise
        _on[model] = self._applied
        self._applied.warn_of_clip(args.max_grad_norm, "pass max_grad_norm=0 to TrainingArguments")
        if state.is_world_process_zero:
            print(session.plan)  # noqa: T201 # as the trainer prints its log

    def _resume(self, session: Session, step: int) -> None:
        """Go on from what the rules knew at the checkpoint that the trainer has restored, where it has one."""
        folder = self._restored()
        if isinstance(folder, (str, PathLike)):
            if (found := state_file.read(Path(folder))) is not None:
                found.load(session._attachment.controller)  # noqa: SLF001 # with the file in its errors
            else:
                name = state_name(_dist.rank())
                where = printable(str(Path(folder) / name))
                self._applied.begins_anew(f"there is no {where}, as without this callback")
        elif step:
            self._applied.begins_anew(_NOT_TOLD)

    def _restored(self) -> object:
        """Return the checkpoint that the trainer goes on from.

        No callback is told, and neither `args` nor `state` has it; a checkpoint of the same step in the output
        directory may be that of another training. So it is taken from the trainer, which is calling this one now.
        """
        for scope in _callers():
            handler = getattr(scope.get("self"), "callback_handler", None)
            if "resume_from_checkpoint" in scope and self in getattr(handler, "callbacks", ()):
                return scope["resume_from_checkpoint"]
        return None

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self.session is None:
            return
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        # On a machine of its own another rank may have none: it resumes from what the first one knows.
        if not folder.is_dir() and _dist.rank():
            return
        try:
            state_file.write(folder, self.session._attachment.controller)  # noqa: SLF001 # as above
        except OSError as error:
            why = printable(error.strerror or str(error))
            self._applied.warn(
                f"what the rules have learnt is not in {printable(str(folder))}: {why}; training goes on"
            )

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
        for scope in _callers():
            callbacks = getattr(scope.get("self"), "callbacks", None)
            if isinstance(callbacks, list) and self in callbacks:
                callbacks.remove(self)
                callbacks.insert(0, self)
                return
        warn(_NOT_FIRST, stacklevel=2)


def _callers() -> Iterator[Mapping[str, Any]]:
    """Yield the variables of the functions that are calling, the nearest first."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # documented
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back
