"""Workflow commands of GitHub Actions: lines of output that GitHub shows beside what they are about."""

from collections.abc import Mapping

from gradsurgeon.errors import printable


def annotation(word: str, properties: Mapping[str, object], text: str) -> str:
    """Return a command such as ``error``. Its arguments are escaped, so that none can end it."""
    given = ",".join(f"{key}={_property(str(value))}" for key, value in properties.items())
    return f"::{word} {given}::{_data(text)}"


def _data(text: str) -> str:
    lines = (printable(line) for line in text.replace("\r\n", "\n").split("\n"))
    return "%0A".join(line.replace("%", "%25").replace("\r", "%0D") for line in lines)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
