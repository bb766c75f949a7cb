"""Commands and options that gradsurgeon no longer has, each with what to use instead."""

GONE = {
    "suggest": "choose a threshold from quantiles of the recorded norms, by `gradsurgeon.open_run(RUN).to_pandas()`; "
    "the page Thresholds of the guide has an example",
    "export --format parquet": "call `gradsurgeon.open_run(RUN).to_pandas().to_parquet(FILE)`",
}


def refusal(words: str) -> str:
    """Return why a command, or an option with its value, is refused."""
    return f"`gradsurgeon {words}` is gone: {GONE[words]}"
