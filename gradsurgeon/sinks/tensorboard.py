"""TensorBoard, by the writer in PyTorch."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from gradsurgeon.sinks.sink import Client


class TensorBoard(Client):
    """Writes event files that ``tensorboard --logdir DIR`` shows.

    Args:
        directory: the directory for the files; it may hold other files.
        names: patterns, as in rule files, of further tensors that get a curve each.

    Raises:
        GradSurgeonError: the package tensorboard is missing.
    """

    def __init__(self, directory: str | os.PathLike[str], *, names: Sequence[str] = ()) -> None:
        super().__init__(names, "torch.utils.tensorboard", "tensorboard")
        self._directory = os.fspath(directory)
        self._open_first()

    def _open(self) -> Any:
        return self._library.SummaryWriter(self._directory)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        # TensorBoard renders Markdown. Four spaces keep lines and columns.
        self._client.add_text(name, "\n".join(f"    {line}" for line in text.split("\n")), step)

    def flush(self) -> None:
        self._client.flush()

    def close(self) -> None:
        if self._is_open:
            self._client.close()
