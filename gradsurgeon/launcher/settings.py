"""What the launcher tells the processes it starts, through their environment."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BOOTSTRAP = Path(__file__).with_name("bootstrap")
RULES, DISABLE = "GRADSURGEON_RULES", "GRADSURGEON_DISABLE"
# The interpreter that the package is installed for; others on the way are left alone.
PREFIX = "GRADSURGEON_PREFIX"
RECORD, START_STEP = "GRADSURGEON_RECORD", "GRADSURGEON_START_STEP"
RESUME = "GRADSURGEON_RESUME"
SINKS = "GRADSURGEON_SINKS"  # one in a line
DRY_RUN, STRICT = "GRADSURGEON_DRY_RUN", "GRADSURGEON_STRICT"
# The file in which the processes of a launch note how far they came.
STATUS_FILE = "GRADSURGEON_STATUS_FILE"
_SWITCHES = {
    "observe": "GRADSURGEON_OBSERVE",
    "pdb": "GRADSURGEON_PDB",
    "quiet": "GRADSURGEON_QUIET",
    "strict": STRICT,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """How rules are to be put on a script: as the options say; paths are absolute, empty for none."""

    rules: str
    record: str = ""
    # Where to write the manifest before stopping at the first step.
    dry_run: str = ""
    # Of the first update; of none, where the run that is resumed says it.
    start_step: int | None = None
    # The run directory to go on from.
    resume: str = ""
    # As `sinks.at_place` takes them.
    sinks: tuple[str, ...] = ()
    observe: bool = False
    pdb: bool = False
    quiet: bool = False
    strict: bool = False

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        environment = {key: value for key, value in base.items() if key not in _ALL}
        environment |= {RULES: self.rules, PREFIX: sys.prefix}
        start_step = "" if self.start_step is None else str(self.start_step)
        values = {
            RECORD: self.record,
            DRY_RUN: self.dry_run,
            START_STEP: start_step,
            RESUME: self.resume,
            SINKS: "\n".join(self.sinks),
        }
        environment |= {key: value for key, value in values.items() if value}
        environment |= {key: "1" for name, key in _SWITCHES.items() if getattr(self, name)}
        # An empty entry is the working directory; an empty variable is none.
        given = environment.get("PYTHONPATH", "")
        paths = given.split(os.pathsep) if given else []
        paths = [str(BOOTSTRAP), *(entry for entry in paths if entry != str(BOOTSTRAP))]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        return environment


_ALL = {RULES, PREFIX, RECORD, START_STEP, RESUME, SINKS, DRY_RUN, *_SWITCHES.values()}


def is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def from_environment(environment: Mapping[str, str]) -> Settings | None:
    """Return the settings of this process, ``None`` without rules or with `GRADSURGEON_DISABLE`."""
    rules = environment.get(RULES, "")
    if not rules or is_on(environment.get(DISABLE, "")):
        return None
    step = environment.get(START_STEP, "")
    if step and not step.isdecimal():
        raise ValueError(f"{START_STEP} is a number of steps, 0 or more, not {step!r}")
    switches = {name: is_on(environment.get(key, "")) for name, key in _SWITCHES.items()}
    return Settings(
        rules=_absolute(rules),
        record=_absolute(environment.get(RECORD, "")),
        dry_run=environment.get(DRY_RUN, ""),
        start_step=int(step) if step else None,
        resume=_absolute(environment.get(RESUME, "")),
        sinks=tuple(environment.get(SINKS, "").split("\n")) if environment.get(SINKS) else (),
        **switches,
    )


def _absolute(path: str) -> str:
    # The script may change directory before it gets there.
    return str(Path(path).absolute()) if path else ""
