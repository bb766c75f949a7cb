"""What gradsurgeon no longer has is refused, and the error says what to use instead."""

from __future__ import annotations

import pytest

from gradsurgeon.cli import main
from gradsurgeon.cli.gone import GONE

INSTEAD = {"suggest": "quantiles of the recorded norms"}


@pytest.mark.parametrize("words", GONE)
def test_a_command_or_option_that_is_gone(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *options = words.split()
    assert main([command, "runs/1", *options]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert f"`gradsurgeon {words}` is gone: " in told
    assert INSTEAD[words] in told
