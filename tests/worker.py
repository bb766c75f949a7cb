"""What a worker does that `ranks.run_ranks` runs on several ranks: the same first and last in each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from ranks import Json


def work(find: Callable[[], Json]) -> NoReturn:
    """Write down what this rank finds, to the file named on the command line with the rank as its ending.

    Args:
        find: runs between ranks that know each other; returns what JSON can hold.
    """
    torch.set_num_threads(1)
    # Ranks that wait for each other in vain are to fail, long before the test is given up.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = find()
    Path(f"{sys.argv[1]}.{dist.get_rank()}").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
    # A thread of gloo that lets go of its last tensor while Python ends would abort the process.
    os._exit(0)
