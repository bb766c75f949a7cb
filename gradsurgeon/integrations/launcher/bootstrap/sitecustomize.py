"""Python imports this file before any script of a launch. It must be quick and must not fail."""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 # pathlib takes longer


def _leave_the_path() -> None:
    # Scripts find `sys.path` as without the launcher; their children get the folder from the environment.
    # `site` made the entries absolute, except relative ones if the working directory is gone.
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]


def _run_the_hidden_sitecustomize() -> None:
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_leave_the_path()
try:
    from gradsurgeon.integrations.launcher.importing import start

    start()
except Exception as error:  # noqa: BLE001 # the script must run in any case
    print(f"gradsurgeon: the script runs without rules: {error}", file=sys.stderr)  # noqa: T201
_run_the_hidden_sitecustomize()
