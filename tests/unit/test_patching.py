from types import SimpleNamespace
from typing import Any

import pytest

from gradsurgeon.common._patching import Patch


class Base:
    def greet(self, name: str) -> str:
        return f"hello {name}"

    @staticmethod
    def double(number: int) -> int:
        return 2 * number


class Derived(Base):
    pass


def louder(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) * 2


def test_calls_go_through_until_the_patch_is_undone() -> None:
    before = vars(Base)["greet"]
    patch = Patch(Base, "greet", louder)
    assert Base().greet("you") == "hello youhello you"
    patch.undo()
    assert vars(Base)["greet"] is before
    assert Base().greet("you") == "hello you"


def test_what_is_inherited_leaves_nothing_on_the_derived_class() -> None:
    patch = Patch(Derived, "greet", louder)
    assert Derived().greet("a") == "hello ahello a"
    assert Base().greet("a") == "hello a"
    patch.undo()
    assert "greet" not in vars(Derived)


def test_static_methods_stay_static() -> None:
    before = vars(Base)["double"]
    patch = Patch(Base, "double", louder)
    assert Base.double(2) == Base().double(2) == 8
    patch.undo()
    assert vars(Base)["double"] is before


def test_a_wrapper_that_came_later_stays_and_ours_only_passes_on() -> None:
    module = SimpleNamespace(function=lambda number: number + 1)
    patch = Patch(module, "function", louder)
    ours = module.function
    module.function = theirs = lambda number: ours(number) + 100
    assert module.function(1) == 104
    patch.undo()
    assert module.function is theirs
    assert module.function(1) == 102


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_patches_of_ours_can_be_undone_in_any_order(order: tuple[int, int]) -> None:
    module = SimpleNamespace(function=lambda number: number + 1)
    patches = [Patch(module, "function", louder) for _ in range(2)]
    assert module.function(1) == 8
    patches[order[0]].undo()
    assert module.function(1) == 4
    patches[order[1]].undo()
    assert module.function(1) == 2
