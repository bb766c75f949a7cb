"""Show warnings and log lines of the package as lines of the launcher; others are left to the script."""

import logging
import warnings
from collections.abc import Callable

from gradsurgeon import _dist
from gradsurgeon._patching import Patch
from gradsurgeon.errors import GradSurgeonWarning
from gradsurgeon.launcher.messages import write
from gradsurgeon.launcher.models import Models
from gradsurgeon.store.layout import database_name


class WarningLines(logging.Handler):
    def __init__(self, models: Models) -> None:
        super().__init__(logging.WARNING)
        self._models = models

    def install(self) -> None:
        """Show them from now on, unless the script shows or records warnings by itself."""
        # The public `showwarning` is the script's to replace: Python calls it before this function. Replacing
        # it here would also lose the source of a ResourceWarning.
        Patch(warnings, "_showwarnmsg_impl", self._show)
        # Events of updates are logged, the first trap or skipped step of a kind at once.
        logging.getLogger("gradsurgeon").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._write(record.getMessage())

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
        params = [param for model in self._models.attached for param in model.params()]
        flat = any(map(_dist.is_flattened, params))
        return flat or _dist.any_sharded(params) or bool(_dist.data_parallel(params))
