"""The threshold that the guide takes from a run: its scripts run, and its rule clips as often as the guide says."""

from __future__ import annotations

from pathlib import Path

import guide
import pytest
import torch
import yaml
from commands import call_here
from ranks import Json


@pytest.mark.slow
def test_a_quantile_of_a_healthy_run_is_a_threshold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = guide.text("thresholds")
    train, read_norms = guide.blocks(page, "python")
    command, shown = guide.blocks(page, "")
    rule, *_ = (yaml.safe_load(block)["rules"][0] for block in guide.blocks(page, "yaml"))
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    known: Json = {}
    exec(train, known)
    exec(read_norms, known)
    printed = capsys.readouterr().out
    # Another machine rounds other last digits.
    numbers = [[*yaml.safe_load(line).values()] for line in printed.splitlines()]
    expected = [[*yaml.safe_load(line).values()] for line in shown.splitlines()]
    assert numbers == [pytest.approx(line, rel=0.05) for line in expected]
    bitten = (known["norms"] > rule["max_norm"]).mean()
    assert 0.01 < bitten < 0.03
    block, *_ = guide.blocks(page, "yaml")
    (tmp_path / "rules.yaml").write_text(block.replace("max_norm: 5", "max_norm: ?"))
    done = call_here(*command.split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The norms of the rule are those that the script has read. `clip-norm` divides a norm at its bound too, by 1 + 1e-6.
    assert done.stdout.splitlines()[-1].endswith(f"  {known['norms'].max():.3g} (1)")
