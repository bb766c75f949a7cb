"""The settings of a launch, as processes hand them to their children through the environment."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

BOOTSTRAP = Path(__file__).with_name("bootstrap")
RULES, DISABLE = "GRADSURGEON_RULES", "GRADSURGEON_DISABLE"
# The interpreter that has the package; processes of other interpreters run without rules.
PREFIX = "GRADSURGEON_PREFIX"
# All other settings, as JSON.
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
    observe: bool = False
    pdb: bool = False
    quiet: bool = False
    strict: bool = False

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment in which Python puts the rules on what it runs."""
        environment = {key: value for key, value in base.items() if key != OPTIONS}
        environment |= {RULES: self.rules, PREFIX: sys.prefix}
        defaults = asdict(Settings(rules=self.rules))
        given = {key: value for key, value in asdict(self).items() if value != defaults[key]}
        if given:
            environment[OPTIONS] = json.dumps(given)
        # An empty entry of PYTHONPATH is the working directory; an empty variable has no entries.
        before = environment.get("PYTHONPATH", "")
        paths = before.split(os.pathsep) if before else []
        paths = [str(BOOTSTRAP), *(entry for entry in paths if entry != str(BOOTSTRAP))]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        return environment


def is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def from_environment(environment: Mapping[str, str]) -> Settings | None:
    """Return the settings of this process, ``None`` without rules or with `GRADSURGEON_DISABLE`.

    Raises:
        ValueError: the variable with the options was not written by `run`.
    """
    rules = environment.get(RULES, "")
    if not rules or is_on(environment.get(DISABLE, "")):
        return None
    try:
        options = json.loads(environment.get(OPTIONS) or "{}")
        # Absolute, because the script may change the directory before it imports torch.
        settings = Settings(rules=str(Path(rules).absolute()), **options)
    except (TypeError, ValueError):
        text = (
            f"{OPTIONS} is not what `gradsurgeon run --print-env` prints: set it anew, or unset it"
        )
        raise ValueError(text) from None
    return replace(settings, sinks=tuple(settings.sinks))
