"""Which session belongs to which model, and the one global hook that finds optimizers."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime.session import Session

# Values are strong: a session lives as long as its model, even if the caller drops it.
_sessions: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()
_global_hook: list[RemovableHandle] = []


def find(model: nn.Module) -> Session | None:
    """Return the session of a model, if there is one that was not removed."""
    session = _sessions.get(model)
    return None if session is None or session.removed else session


def enter(model: nn.Module, session: Session, *, replace: bool) -> None:
    """Attach a session to its model.

    Raises:
        GradSurgeonError: there is one already and ``replace`` is false.
    """
    old = find(model)
    if old is not None and not replace:
        raise GradSurgeonError(
            "rules are already applied to this model: call gradsurgeon.remove(model) first, or pass "
            "replace=True"
        )
    session.attach(leave)
    if old is not None:
        old.remove()
    _sessions[model] = session
    # The finalizer is what notices a model that goes away; it must not keep the model itself.
    weakref.finalize(model, _model_gone, weakref.ref(session)).atexit = False
    if not _global_hook:
        _global_hook.append(register_optimizer_step_pre_hook(_on_step))


def leave() -> None:
    """Take the global hook off once no session needs it."""
    if _global_hook and all(session.removed for session in _sessions.values()):
        _global_hook.pop().remove()


def _model_gone(session: weakref.ref[Session]) -> None:
    if (gone := session()) is not None:
        gone.model_gone()
    leave()


def _on_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Introduce an optimizer to the sessions.

    What they register on the optimizer itself runs later in this same step, after the hooks of the
    script's own that were there before.
    """
    del args, kwargs
    for session in list(_sessions.values()):
        if not session.removed:
            session.meet(optimizer)
