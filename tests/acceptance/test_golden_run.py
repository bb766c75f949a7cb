"""A run directory in the repository as a golden run: training today agrees with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import golden
import pytest

import gradsurgeon
from gradsurgeon.cli import main


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs with noise of the size of rounding."""
    folder, found = tmp_path_factory.mktemp("noise"), []
    for seed in range(3):
        rule = {"action": "perturb", "modules": "*", "where": {"owns_params": True}, "eps": 1e-6}
        rules = [
            {"id": f"noise-{word}", "tensor": tensor, "seed": seed, **rule}
            for word, tensor in (("in", "input"), ("back", "output.grad"))
        ]
        given = {"version": 1, "include": [golden.PACK], "rules": rules}
        found.append(golden.record(folder / f"noise{seed}", given))
    return found


def test_training_agrees_with_the_golden_run(tmp_path: Path, noise: list[Path]) -> None:
    run = golden.record(tmp_path / "run")
    words = ["compare", str(run), str(golden.GOLDEN)]
    for one in noise:
        words += ["--noise", str(one)]
    assert main(words) == 0


def test_a_slip_parts_from_the_golden_run_at_its_place(tmp_path: Path, noise: list[Path]) -> None:
    run = golden.record(tmp_path / "run", power=1.0)
    found = gradsurgeon.compare(run, golden.GOLDEN, noise)
    assert not found.alike
    assert (found.step, found.phase) == (0, "forward")
    assert found.first[0].text == "input of head"


def test_a_run_of_an_earlier_version_has_sizes_of_frozen_parameters(tmp_path: Path) -> None:
    run = shutil.copytree(golden.GOLDEN, tmp_path / "run")
    about = json.loads((run / "run.json").read_text())
    about["model"]["params"][0] |= {"requires_grad": False, "numel": 48}
    (run / "run.json").write_text(json.dumps(about))
    name = about["model"]["params"][0]["name"]
    with gradsurgeon.open_run(run) as opened:
        assert gradsurgeon.report.summary(opened).frozen == {name: 48}


def test_a_run_without_shapes_cannot_tell_what_rules_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        'version: 1\nrules: [{id: clip, action: clip-norm, params: "*", max_norm: 1.0}]\n'
    )
    assert main(["plan", str(rules), "--on", str(golden.GOLDEN)]) == 2
    assert "an earlier version recorded this run" in capsys.readouterr().err


def test_it_is_small() -> None:
    sizes = [file.stat().st_size for file in golden.GOLDEN.iterdir()]
    assert sorted(file.name for file in golden.GOLDEN.iterdir()) == ["rank-0.db", "run.json"]
    assert sum(sizes) < 150_000
