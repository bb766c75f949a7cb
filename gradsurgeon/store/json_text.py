"""JSON to the letter, which every reader takes and a terminal shows as it is."""

import json
import math

# JSON has no numbers for these; the spelling is that of Protocol Buffers.
_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return JSON of printable ASCII; control characters are escapes."""
    return json.dumps(value, indent=indent, allow_nan=False)


def json_number(value: float) -> float | str:
    """Return a number for JSON, NaN and infinity as texts."""
    return float(digits(value)) if math.isfinite(value) else nonfinite_name(value)


def nonfinite_name(value: float) -> str:
    return _NAMES.get(value, "NaN")


def digits(value: float) -> str:
    """Return the nine digits that tell every float32 from the next."""
    return f"{value:.9g}"
