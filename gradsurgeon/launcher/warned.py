"""Warnings and log lines of the package, as lines of the launcher; all others, and all filters, are the script's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from gradsurgeon import _dist
from gradsurgeon._patching import Patch
from gradsurgeon.errors import GradSurgeonWarning
from gradsurgeon.launcher import telling
from gradsurgeon.launcher.models import Models
from gradsurgeon.store.layout import database_name


class Warned:
    """Shows the warnings that the filters let through, and what is logged."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._replicas = False

    def install(self) -> None:
        """Show them from now on, unless the script shows or records warnings by itself."""
        # `showwarning`, which is public, is for the script to replace: it goes before this, and loses the source
        # of a warning about a resource where it is replaced.
        Patch(warnings, "_showwarnmsg_impl", self._show)
        # What happens to updates is logged: the first trap or skipped step of a kind at once.
        logging.getLogger("gradsurgeon").addHandler(_Lines(self._say))

    def _show(
        self, show: Callable[[warnings.WarningMessage], None], warning: warnings.WarningMessage
    ) -> None:
        if issubclass(warning.category, GradSurgeonWarning) and warning.file is None:
            self._say(str(warning.message))
        else:
            show(warning)

    def _say(self, text: str) -> None:
        rank = _dist.rank()
        if rank == 0:
            telling.write([f"gradsurgeon: {text}"], 0)
        elif not self._alike() or database_name(rank) in text:
            telling.write([f"gradsurgeon: rank {rank}: {text}"], 0)

    def _alike(self) -> bool:
        """Tell whether all ranks train the same model, and warn of the same."""
        if not self._replicas:
            models = [one.model() for one in self._models.attached]
            params = [
                param for model in models if model is not None for param in model.parameters()
            ]
            self._replicas = (
                _dist.any_sharded(params)
                or any(map(_dist.is_flattened, params))
                or bool(_dist.data_parallel(params))
            )
        return self._replicas


class _Lines(logging.Handler):
    """Says what is logged as a warning, or worse."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Say one line."""
        self._say(record.getMessage())
