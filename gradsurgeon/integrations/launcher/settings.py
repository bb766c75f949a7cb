"""The settings of a launch, as processes hand them to their children through the environment."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

BOOTSTRAP = Path(__file__).with_name("bootstrap")
DISABLE = "GRADSURGEON_DISABLE"
OPTIONS = "GRADSURGEON_OPTIONS"


@dataclass(frozen=True, slots=True)
class Settings:
    """How to put rules on a script. Paths are absolute; an empty path means none."""

    rules: str
    record: str = ""
    dry_run: str = ""  # where to write the manifest before stopping at the first step
    start_step: int | None = None  # number of the first update; without it a resumed run decides
    resume: str = ""  # the run directory to resume from
    sinks: tuple[str, ...] = ()  # in the form that `sinks.at_place` accepts
    perturb: float = 0.0  # the size of the noise of a run for `gradsurgeon compare --noise`
    seed: int = 0  # of that noise
    observe: bool = False
    pdb: bool = False
    quiet: bool = False
    probe: bool = False  # ask the first batch questions, and stop at the first step
    modules: tuple[str, ...] = ()  # imported before the rules are read, for actions of the user
    params: str = ""  # the names of the model with which the rules were reviewed
    on_event: str = ""  # a command of the shell that gets each event

    @property
    def first_step(self) -> int:
        """The number of the first update, if no resumed run decides it."""
        return self.start_step or 0

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment in which Python puts the rules on what it runs."""
        # An empty entry of PYTHONPATH is the working directory; an empty variable has no entries.
        before = base.get("PYTHONPATH", "")
        paths = [str(BOOTSTRAP)]
        if before:
            paths += [entry for entry in before.split(os.pathsep) if entry != str(BOOTSTRAP)]
        options = json.dumps(asdict(self))
        return {**base, OPTIONS: options, "PYTHONPATH": os.pathsep.join(paths)}


def without_rules(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command that is no part of the training."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    others = os.pathsep.join(path for path in paths if path != str(BOOTSTRAP))
    plain = {**environment, "PYTHONPATH": others}
    plain.pop(OPTIONS, None)
    return plain


def is_off(environment: Mapping[str, str]) -> bool:
    value = environment.get(DISABLE, "").strip().lower()
    return value not in ("", "0", "false", "no", "off")


def from_environment(environment: Mapping[str, str]) -> Settings | None:
    """Return the settings of this process, ``None`` without rules or with `GRADSURGEON_DISABLE`."""
    if not environment.get(OPTIONS) or is_off(environment):
        return None
    options = json.loads(environment[OPTIONS])
    for name in ("sinks", "modules"):
        options[name] = tuple(options[name])
    return Settings(**options)
