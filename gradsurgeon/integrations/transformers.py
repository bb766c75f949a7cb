"""Rules in Hugging Face's `Trainer`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from gradsurgeon.common._libraries import library
from gradsurgeon.errors import printable, reason_of, warn
from gradsurgeon.integrations.applied import AppliedRules
from gradsurgeon.records.store.layout import state_name
from gradsurgeon.runtime import session_state
from gradsurgeon.runtime.session import attachment_of
from gradsurgeon.tensors import _dist

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from gradsurgeon.runtime.session import Session

_transformers = library("transformers", "transformers", "TransformersCallback")
if not TYPE_CHECKING:
    TrainerCallback = _transformers.TrainerCallback

# The rules on each model: a training that raises tells no callback, and the next may use another callback.
_on: WeakKeyDictionary[Any, AppliedRules] = WeakKeyDictionary()
_NOT_FIRST = (
    "this release of transformers hides its list of callbacks: the numbers of the rules are in "
    "trainer.state.log_history, but may be missing in TensorBoard and other reporters; pass sinks=[...] to "
    "TransformersCallback to send them there"
)
_NOT_TOLD = (
    "this release of transformers hides the checkpoint that it resumes from; in `on_train_begin` of a callback after "
    "this one, pass the content of its `state-RANK.pt` to `callback.session.load_state_dict()`"
)


class TransformersCallback(AppliedRules, TrainerCallback):
    """Applies rules while ``Trainer.train`` trains: ``Trainer(..., callbacks=[TransformersCallback("rules.yaml")])``.

    The rules act from the first step, after a checkpoint is restored, until the training ends. A trainer that
    raises tells no callback. Then the rules stay on the model until its next training, or until
    `gradsurgeon.remove`. Each checkpoint holds in `state-RANK.pt` what the rules learnt, and a resumed training
    loads it; a checkpoint without it causes a warning. The first rank prints the plan.

    The trainer's log on the console, in ``trainer.state.log_history`` and in its reporters gets further numbers. For
    each rule that records norms these are the norm of all tensors together, the median, and the number of
    non-finite norms: ``gradsurgeon/<rule>/total``, ``median`` and ``not finite``. The number of events of each
    kind is ``gradsurgeon/events/<kind>``.

    Args:
        rules: as for `gradsurgeon.load`.
        names: patterns, as in rule files, of tensors that get a number each.
        **options: further options of `gradsurgeon.apply`, except `start_step`, which the trainer knows.

    Attributes:
        session: the session of the last training, with readable records; ``None`` before.

    Raises:
        RuleFileError: the rules are not valid.
        GradSurgeonError: transformers is not installed.
    """

    def on_train_begin(self, args: Any, state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        scope = self._scope_of_trainer()
        if scope:
            # Before the reporters, which the trainer puts first: they report the log as they find it. The callbacks
            # after this one keep their places, so none is skipped or called twice.
            callbacks = scope["self"].callback_handler.callbacks
            callbacks.remove(self)
            callbacks.insert(0, self)
        else:
            warn(_NOT_FIRST, stacklevel=2)
        unended = _on.pop(model, None)
        if unended is not None:
            unended._end()  # noqa: SLF001 # of this class
        session = self._begin(model, state.global_step)
        try:
            self._resume(session, state.global_step, scope.get("resume_from_checkpoint"))
        except BaseException:
            self._end()
            raise
        _on[model] = self
        self._warn_of_clip(args.max_grad_norm, "pass max_grad_norm=0 to TrainingArguments")
        if state.is_world_process_zero:
            print(session.plan)  # noqa: T201 # as the trainer prints its log

    def _resume(self, session: Session, step: int, folder: object) -> None:
        """Load the state of the rules from the checkpoint that the trainer restored, if there is one."""
        # A checkpoint of the same step in the output directory may belong to another training.
        if isinstance(folder, (str, PathLike)):
            controller = attachment_of(session).controller
            if session_state.resume(Path(folder), controller) is None:
                name = state_name(_dist.rank())
                where = printable(str(Path(folder) / name))
                self._warn_of_restart(
                    step, f"there is no {where}; a training without this callback writes none"
                )
        elif step:
            self._warn_of_restart(step, _NOT_TOLD)

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self.session is None:
            return
        prefix = _transformers.trainer_utils.PREFIX_CHECKPOINT_DIR
        folder = Path(args.output_dir) / f"{prefix}-{state.global_step}"
        # A rank on another machine may have no folder; it resumes from the state of the first rank.
        if not folder.is_dir() and _dist.rank():
            return
        try:
            session_state.write(folder, attachment_of(self.session).controller)
        except OSError as error:
            why = reason_of(error)
            self._warn(
                f"cannot save what the rules learnt in {printable(str(folder))}: {why}; training continues"
            )

    def on_log(
        self, _args: Any, state: Any, _control: Any, logs: dict[str, float], **_: Any
    ) -> None:
        if any(name.startswith("eval_") for name in logs):
            return
        metrics = self._metrics()
        logs.update(metrics)
        # The history holds a copy, which the trainer made just before.
        state.log_history[-1].update(metrics)

    def on_train_end(self, *_: Any, model: Any, **_kwargs: Any) -> None:
        _on.pop(model, None)
        self._end()

    def _scope_of_trainer(self) -> Mapping[str, Any]:
        """Return the variables of the trainer's loop: no callback gets its list of callbacks, or its checkpoint."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # documented
        while frame is not None:
            handler = getattr(frame.f_locals.get("self"), "callback_handler", None)
            if self in getattr(handler, "callbacks", ()):
                return frame.f_locals
            frame = frame.f_back
        return {}
