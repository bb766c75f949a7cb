"""The table of methods, held against the installed TorchJD, and each claim in it against numbers."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from ranks import Json
from torch import Tensor

from gradsurgeon import GradSurgeonError
from gradsurgeon.actions._methods import METHODS, OPTIONS, Weigher
from gradsurgeon.actions.combine import Combine

pytestmark = pytest.mark.slow

torchjd = pytest.importorskip("torchjd")
aggregation = pytest.importorskip("torchjd.aggregation")

C = 0.4
GIVEN: Mapping[str, Json] = {
    "cagrad": {"c": C},
    "fairgrad": {"alpha": 2.0},
}


def without_conflict() -> Iterator[Tensor]:
    """Yield gradients of which no two conflict, ``[3, n]``: of equal and of very different lengths, many directions."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[1.0], [3.0], [10.0]], dtype=torch.float64)
    yield torch.eye(3, dtype=torch.float64)
    yield torch.diag(lengths.flatten())
    yield torch.ones(3, 4, dtype=torch.float64)
    yield lengths * torch.ones(3, 4, dtype=torch.float64)
    for size in (3, 5, 20):
        for scale in (1.0, lengths, 1e-6):
            yield scale * torch.rand(3, size, dtype=torch.float64, generator=generator)


def weights(method: str, gradients: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Weigher(method, GIVEN.get(method, {}), None)(gradients @ gradients.T)


def norm(gradients: Tensor, weights: Tensor) -> float:
    return float((weights @ gradients).norm())


AVERAGE = torch.full((3,), 1 / 3, dtype=torch.float64)
# What each claim of the table means. One about no length has nothing to hold.
CLAIMS: Mapping[str, Callable[[Tensor, Tensor], bool]] = {
    "the sum": lambda of, found: torch.allclose(found, 3 * AVERAGE, atol=1e-6),
    "the average": lambda of, found: torch.allclose(found, AVERAGE, atol=1e-6),
    "an average, with weights that add up to 1": lambda of, found: (
        abs(float(found.sum()) - 1) < 1e-6
    ),
    "at most the length of the average": lambda of, found: (
        norm(of, found) <= norm(of, AVERAGE) * (1 + 1e-6)
    ),
    "at most 1 + `c` times the length of the average": lambda of, found: (
        norm(of, found) <= (1 + C) * norm(of, AVERAGE) * (1 + 1e-4)
    ),
    "a length of its own": lambda of, found: True,
}
SIZES = dict.fromkeys(method.size for method in METHODS.values())


@pytest.mark.parametrize("method", METHODS)
def test_what_comes_out_without_conflict(method: str) -> None:
    for gradients in without_conflict():
        assert (gradients @ gradients.T >= 0).all()
        found = weights(method, gradients)
        assert CLAIMS[METHODS[method].size](gradients, found), (gradients, found)


def test_all_claims_are_of_the_table() -> None:
    assert set(CLAIMS) == set(SIZES)


@pytest.mark.parametrize("method", METHODS)
class TestTorchJD:
    def weighting(self, method: str) -> Any:
        return getattr(aggregation, METHODS[method].weighting)

    def test_takes_these_options(self, method: str) -> None:
        known = METHODS[method]
        parameters = dict(inspect.signature(self.weighting(method)).parameters)
        needed = {
            name for name, one in parameters.items() if one.default is inspect.Parameter.empty
        }
        assert set(known.options) == needed
        assert ("pref_vector" in parameters) is known.takes_preference
        assert ("projector" in parameters) is (known.takes_preference and bool(known.solvers))

    def test_keeps_nothing_from_one_call_to_the_next(self, method: str) -> None:
        assert not issubclass(self.weighting(method), torchjd.Stateful)
        one, other = torch.rand(2, 3, 3, dtype=torch.float64).tensor_split(2)
        first, second = (part[0] @ part[0].T for part in (one, other))
        weigher = Weigher(method, GIVEN.get(method, {}), None)

        def seeded(products: Tensor) -> list[float]:
            torch.manual_seed(0)
            found: list[float] = weigher(products).tolist()
            return found

        with torch.random.fork_rng(devices=[]):
            before = seeded(first)
            seeded(second)
            assert seeded(first) == before


def test_every_option_is_that_of_a_method() -> None:
    of_methods = {option for method in METHODS.values() for option in method.options}
    assert of_methods == set(OPTIONS)
    assert of_methods <= set(Combine.model_fields)


@pytest.mark.parametrize("preference", [[1.0, 1.0, 1.0], [2.0, 0.5, 1.0]])
@pytest.mark.parametrize(
    "method", [name for name, known in METHODS.items() if known.takes_preference]
)
def test_without_conflict_a_preference_weighs_the_sum(method: str, preference: list[float]) -> None:
    wanted = torch.tensor(preference, dtype=torch.float64)
    for gradients in without_conflict():
        found = Weigher(method, {}, preference)(gradients @ gradients.T)
        if METHODS[method].size == "the average":
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
        assert norm(gradients, found) <= norm(gradients, wanted) * (1 + 1e-6)


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ImportError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
import gradsurgeon
from torch import nn

for method, options in eval(sys.argv[2]).items():
    rule = {"id": method, "action": "combine", "params": "*", "losses": ["a", "b", "c"], "method": method, **options}
    rules = {"version": 1, "rules": [rule]}
    gradsurgeon.plan(nn.Linear(2, 1), rules)  # needs none of them
    try:
        gradsurgeon.apply(nn.Linear(2, 1), rules)
    except gradsurgeon.BindError as error:
        print(str(error).splitlines()[-1])
    else:
        print("applied", method)
"""


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["quadprog,qpsolvers,cvxpy,clarabel,scipy", "torchjd"])
def test_a_library_that_is_not_installed_is_named_with_the_extra(missing: str) -> None:
    options = repr({method: GIVEN.get(method, {}) for method in METHODS})
    command = [sys.executable, "-c", WITHOUT, missing, options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for (method, known), line in zip(METHODS.items(), done.stdout.splitlines(), strict=True):
        if missing != "torchjd" and not known.solvers:
            assert line == f"applied {method}"
            continue
        library = "torchjd.aggregation" if missing == "torchjd" else known.solvers[0]
        assert f"rule {method}: `method: {method}` needs the library {library}" in line
        assert line.endswith("pip install 'gradsurgeon[surgery]'")


@pytest.mark.parametrize(
    ("method", "library"),
    [(method, library) for method, known in METHODS.items() for library in known.solvers],
)
def test_each_library_is_asked_for(
    method: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(GradSurgeonError, match=f"needs the library {library}"):
        Weigher(method, GIVEN.get(method, {}), None)
