"""Train as one function of the gallery does, and print a checksum of the weights: `train.py MODULE FUNCTION [RANKS]`."""

import importlib
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

sys.path.append("..")
from weights import digest

SLEEP = time.sleep


def sleep(seconds):
    """Sleep, and say so if it is gradsurgeon that waits in the script."""
    if sys._getframe(1).f_globals.get("__name__", "").startswith("gradsurgeon"):
        print("gradsurgeon waits")
    SLEEP(seconds)


module, name, *ranks = sys.argv[1:]
function = getattr(importlib.import_module(module), name)
if ranks:
    # Ranks that wait in vain fail.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.get_world_size() == int(ranks[0])
torch.set_num_threads(1)
torch.manual_seed(0)
time.sleep = sleep
modules = function()
time.sleep = SLEEP
print(
    "weights", digest(*(modules if isinstance(modules, (list, tuple)) else [modules])), flush=True
)
if ranks:
    dist.barrier()
    dist.destroy_process_group()
