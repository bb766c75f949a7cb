"""Runs one pattern in which a rank ends before the others, as a script does: no word of the test on the way out."""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import patterns
from distributed.patterns import Case


def main() -> None:
    """Run it, and write down after each update what has come of it."""
    out, name, how = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    case = Case(how)

    def keep() -> None:
        found = {"updates": case.updates, "weights": case.weights()}
        Path(f"{out}.{case.rank}").write_text(json.dumps(found), encoding="utf-8")

    case.kept = keep
    patterns.DEADLY[name](case)


if __name__ == "__main__":
    main()
