"""Imports optional libraries. The error names the extra that installs a missing one."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gradsurgeon.errors import GradSurgeonError


def is_installed(name: str) -> bool:
    return find_spec(name) is not None


def library(name: str, extra: str, what: str) -> Any:
    """Return a library that comes with an extra; ``what`` needs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise GradSurgeonError(
            f"{what} needs the library {name}, which cannot be imported ({error}): "
            f"pip install 'gradsurgeon[{extra}]'"
        ) from error
