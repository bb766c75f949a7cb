"""Strict JSON that every reader accepts and a terminal can show."""

import json
import math

# JSON has no numbers for these. Protocol Buffers spell them so.
_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return JSON of printable ASCII. Control characters are escapes."""
    return json.dumps(value, indent=indent, allow_nan=False)


def json_number(value: float) -> float | str:
    """Return a number for JSON. NaN and infinity become texts."""
    return float(digits(value)) if math.isfinite(value) else nonfinite_name(value)


def nonfinite_name(value: float) -> str:
    return _NAMES.get(value, "NaN")


def digits(value: float) -> str:
    """Return nine digits, enough to tell every float32 from the next."""
    return f"{value:.9g}"
