"""The pytest plugin: `@pytest.mark.gradsurgeon` puts a trap, or rules, on every model that a test trains.

Every pytest run imports this module if gradsurgeon is installed. So the module imports neither torch nor the rest
of gradsurgeon until a marked test runs.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gradsurgeon.integrations._tested_models import TestedModels

_MARKER = (
    'gradsurgeon(rules=None, *, mode="act"): put the rules on every model that the body of the test trains; '
    "without rules, a trap fails the test if a gradient is NaN or infinite"
)
_TRAP = {"id": "nan-trap", "action": "nan-trap", "params": "*", "then": "raise"}
_MODELS: pytest.StashKey[TestedModels] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def gradsurgeon_sessions(request: pytest.FixtureRequest) -> TestedModels:
    """The sessions on the models that the body of the test trained so far: a live sequence."""
    if _MODELS not in request.node.stash:
        pytest.fail(
            "the fixture gradsurgeon_sessions needs a marked test: add `@pytest.mark.gradsurgeon`",
            pytrace=False,
        )
    models: TestedModels = request.node.stash[_MODELS]
    return models


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Plugins run before the fixtures, and after `skipif`.
    if (marker := item.get_closest_marker("gradsurgeon")) is not None:
        try:
            signature(_models).bind(item, *marker.args, **marker.kwargs)
        except TypeError as error:
            raise _failure(f"takes rules and mode=, but {error}") from None
        item.stash[_MODELS] = _models(item, *marker.args, **marker.kwargs)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    if _MODELS not in item.stash:
        return (yield)
    models = item.stash[_MODELS]
    try:
        with models:
            result = yield
    except BaseException as error:
        if not _shorten(error):  # the report of a trap tells it
            _add_diagnosis(item, models)
        raise
    _add_diagnosis(item, models)
    if problem := models.problem():
        raise _failure(problem)
    return result


def pytest_runtest_teardown(item: pytest.Item) -> None:
    # pytest keeps items until the end of the run, and records may be large.
    if _MODELS in item.stash:
        del item.stash[_MODELS]


def _models(item: pytest.Item, rules: Any = None, *, mode: str = "act") -> TestedModels:
    if mode not in ("act", "observe"):
        raise _failure(f'takes mode="act" or mode="observe", not {mode!r}')
    from gradsurgeon import api  # noqa: PLC0415 # only for marked tests
    from gradsurgeon.errors import RuleFileError  # noqa: PLC0415 # the same

    try:
        from gradsurgeon.integrations._tested_models import TestedModels  # noqa: PLC0415 # the same
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        why = "needs PyTorch, which is not installed: pip install 'gradsurgeon[torch]'"
        raise _failure(why) from None

    given: Any = {"version": 1, "rules": [_TRAP]} if rules is None else _found(item, rules)
    try:
        loaded = api.load(given)
    except (RuleFileError, TypeError) as error:
        raise _failure(f"has rules that cannot be used:\n{error}") from None
    return TestedModels(loaded, observe=mode == "observe", fails=rules is None)


def _found(item: pytest.Item, rules: Any) -> Any:
    """Return the rules; a relative path is looked up beside the test, then in the root directory."""
    from gradsurgeon.errors import printable  # noqa: PLC0415 # only for marked tests
    from gradsurgeon.packs import PREFIX  # noqa: PLC0415 # the same

    is_path = isinstance(rules, str | os.PathLike) and "\n" not in str(rules)
    if not is_path or str(rules).startswith(PREFIX):
        return rules

    places = [folder / rules for folder in (item.path.parent, item.config.rootpath)]
    for place in places:
        if place.is_file():
            return place
    looked = " and ".join(dict.fromkeys(printable(str(place)) for place in places))
    raise _failure(f"names a rule file that does not exist at {looked}: correct the path")


def _shorten(error: BaseException | None) -> bool:
    """End the traceback of a trap in the line of the test that took the step; tell whether the error is a trap's."""
    from gradsurgeon.errors import TrapError  # noqa: PLC0415 # only for marked tests
    from gradsurgeon.launcher.debugger import cut_behind_the_script  # noqa: PLC0415 # the same

    is_of_a_trap = isinstance(error, TrapError)
    while error is not None:
        if isinstance(error, TrapError) and error.__traceback__ is not None:
            cut_behind_the_script(error.__traceback__)
        error = error.__cause__ or error.__context__
    return is_of_a_trap


def _add_diagnosis(item: pytest.Item, models: TestedModels) -> None:
    if text := models.diagnosis():
        item.add_report_section("call", "gradsurgeon", text)


def _failure(problem: str) -> BaseException:
    return pytest.fail.Exception(f"@pytest.mark.gradsurgeon: {problem}", pytrace=False)
