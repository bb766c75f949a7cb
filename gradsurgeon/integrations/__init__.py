"""Callbacks for trainers: rules act while the trainer trains, and its own log shows their measurements.

The first access to a callback imports its trainer.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsurgeon.integrations.lightning import LightningCallback
    from gradsurgeon.integrations.transformers import TransformersCallback

__all__ = ["LightningCallback", "TransformersCallback"]

_MODULE_OF = {"LightningCallback": "lightning", "TransformersCallback": "transformers"}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradsurgeon.integrations' has no attribute {name!r}")
    return getattr(import_module(f"gradsurgeon.integrations.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
