"""Commands and options that gradsurgeon no longer has, each with what to use instead."""

import argparse
from collections.abc import Callable

GONE = {
    "suggest": "choose a threshold from quantiles of the recorded norms, by `gradsurgeon.open_run(RUN).to_pandas()`; "
    "the page Thresholds of the guide has an example",
    "export --format parquet": "call `gradsurgeon.open_run(RUN).to_pandas().to_parquet(FILE)`",
    "report --format github": "`--fail-on` prints a line for each kind of event",
}


def refusal(words: str) -> str:
    """Return why a command, or an option with its value, is refused."""
    return f"`gradsurgeon {words}` is gone: {GONE[words]}"


def refuse(words: str) -> Callable[[str], str]:
    """Return the type of an option that once had a further value."""
    value = words.rpartition(" ")[2]

    def given(text: str) -> str:
        if text == value:
            raise argparse.ArgumentTypeError(refusal(words))
        return text

    return given
