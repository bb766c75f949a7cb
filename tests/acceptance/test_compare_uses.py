"""`gradsurgeon compare` on two runs of one script that should agree, made by `gradsurgeon run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from outside import Folder

import gradsurgeon

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "compared.py")
PACK = "gradsurgeon:fingerprint@1"
# Rules on parameters alone leave `torch.compile` its graphs.
PARAMS = """
version: 1
rules:
  - {id: gradients, action: norm-log, params: "*", stats: [l2, numel, projection]}
  - {id: weights, action: norm-log, params: "*", tensor: value, stats: [l2, numel, projection]}
"""
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that runs the script once in some way, and returns the run directory."""
    folder, known = tmp_path_factory.mktemp("compared"), dict[tuple[str, ...], Path]()
    (folder / "params.yaml").write_text(PARAMS)

    def make(way: str, *options: str, rules: str = PACK, ranks: int = 0) -> Path:
        key = (way, rules, *options)
        if key not in known:
            known[key] = folder / f"run-{len(known)}"
            words = ["-m", "gradsurgeon", "run", "--quiet", "--rules", rules]
            words += ["--record", str(known[key]), *options]
            words += [SCRIPT, way, str(folder / "checkpoint.pt")]
            done = Folder(folder).fork(*words, ranks=ranks)
            assert done.code == 0, done.err[-3000:]
        return known[key]

    return make


def noise(
    run: Make, way: str = "plain", eps: str = "1e-6", rules: str = PACK, count: int = 3
) -> list[Path]:
    seeds = map(str, range(count))
    return [run(way, "--perturb", eps, "--seed", seed, rules=rules) for seed in seeds]


def test_eager_and_compiled(run: Make) -> None:
    rules = "params.yaml"
    reference = run("plain", rules=rules)
    found = gradsurgeon.compare(run("compiled", rules=rules), reference, noise(run, rules=rules))
    assert found.alike, found


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_one_process_and_two_ranks(run: Make, way: str) -> None:
    found = gradsurgeon.compare(run(way, ranks=2), run("plain"), noise(run))
    assert found.alike, found
    assert "only gradients and weights are compared" in str(found)
    assert len(found.steps) == 6


def test_accumulation_and_a_batch_twice_as_large(run: Make) -> None:
    found = gradsurgeon.compare(run("accumulated"), run("plain"), noise(run))
    assert found.alike, found
    assert "only gradients and weights are compared" in str(found)


def test_a_refactoring_under_autocast(run: Make) -> None:
    found = gradsurgeon.compare(run("bf16-refactored"), run("bf16"), noise(run, "bf16", "4e-3"))
    assert found.alike, found


def test_half_precision_and_float32(run: Make) -> None:
    found = gradsurgeon.compare(run("bf16"), run("plain"), noise(run, eps="4e-3", count=6))
    assert found.alike, found
    assert "gross" in str(found)


def test_a_refactoring_in_float32(run: Make) -> None:
    found = gradsurgeon.compare(run("refactored"), run("plain"), noise(run))
    assert found.alike, found


def test_resumed_and_unbroken(run: Make) -> None:
    unbroken = run("saved")
    found = gradsurgeon.compare(run("resumed", "--start-step", "3"), unbroken)
    assert found.alike, found
    assert [step.step for step in found.steps] == [3, 4, 5]
    assert "bit for bit" in str(found)
