"""The faults and harmless changes of `python -m benchmarks.parting`."""

from __future__ import annotations

import pytest

from benchmarks import parting


@pytest.mark.slow
def test_every_fault_is_at_its_place_and_harmless_changes_are_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = parting.main(["2"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert f"{len(parting.FAULTS)} of {len(parting.FAULTS)} faults at their place" in out


@pytest.mark.slow
def test_a_fault_at_another_place_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = parting.FAULTS[0]._replace(place="output of head")
    monkeypatch.setattr(parting, "FAULTS", (wrong,))
    assert parting.main(["0"]) == 1
    out = capsys.readouterr().out
    assert "input of h.1.attn.o" in out
    assert "expected: output of head" in out
    assert "0 of 1 faults at their place" in out
