"""Shows warnings and log lines of the package as lines of the launcher; all others are left to the script."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from gradsurgeon import _dist
from gradsurgeon._patching import Patch
from gradsurgeon.errors import GradSurgeonWarning
from gradsurgeon.launcher.messages import write
from gradsurgeon.launcher.models import Models
from gradsurgeon.store.layout import database_name


class WarningLines:
    """Shows the warnings that the filters let through, and what is logged."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._alike = False

    def install(self) -> None:
        """Show them from now on, unless the script shows or records warnings by itself."""
        # `showwarning`, which is public, is for the script to replace: it goes before this, and loses the source
        # of a warning about a resource where it is replaced.
        Patch(warnings, "_showwarnmsg_impl", self._show)
        # What happens to updates is logged: the first trap or skipped step of a kind at once.
        logging.getLogger("gradsurgeon").addHandler(_LogLines(self._write))

    def _show(
        self, show: Callable[[warnings.WarningMessage], None], warning: warnings.WarningMessage
    ) -> None:
        if issubclass(warning.category, GradSurgeonWarning) and warning.file is None:
            self._write(str(warning.message))
        else:
            show(warning)

    def _write(self, text: str) -> None:
        rank = _dist.rank()
        if rank == 0:
            write([f"gradsurgeon: {text}"], 0)
        elif not self._ranks_are_alike() or database_name(rank) in text:
            write([f"gradsurgeon: rank {rank}: {text}"], 0)

    def _ranks_are_alike(self) -> bool:
        """Return whether all ranks train the same model, and warn of the same."""
        if not self._alike:
            params = [param for model in self._models.attached for param in model.params()]
            self._alike = (
                _dist.any_sharded(params)
                or any(map(_dist.is_flattened, params))
                or bool(_dist.data_parallel(params))
            )
        return self._alike


class _LogLines(logging.Handler):
    """Writes what is logged as a warning, or worse."""

    def __init__(self, write_text: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._write_text = write_text

    def emit(self, record: logging.LogRecord) -> None:
        self._write_text(record.getMessage())
