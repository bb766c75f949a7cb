"""What the numbers were measured on, and with which versions."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gradsurgeon.language.schema import VERSION

ROOT = Path(__file__).parents[1]
# Distribution names of the peers and of what they stand on.
PEERS = ("transformers", "accelerate", "lightning", "wandb")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
EXTRA = "pip install 'gradsurgeon[bench]'"


def devices() -> list[str]:
    """Return the kinds of device that can be measured here."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def keep_freed_memory() -> None:
    """Let glibc keep memory that tensors free, as it does in a process that has freed a large one.

    Otherwise what lies above it in the heap decides whether a step gets it anew, page by page, which takes longer than
    whatever is measured. Tensors of more than 32 MB always come anew, as they do in any process.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_THRESHOLD, 2**25)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def describe(device: str) -> dict[str, Any]:
    """Return the machine: what a reader needs to judge whether his own is like it."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "kind": device,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Return the versions of everything that takes part; ``missing`` where a peer is not installed."""
    own = {
        "gradsurgeon": VERSION,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    return own | {name: version(name) for name in PEERS}


def version(name: str) -> str:
    """Return the version of an installed distribution, or ``missing``."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def commit() -> str:
    """Return the commit of the checkout, marked where files differ from it; empty without git."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def cpu_name() -> str:
    """Return the name of the processor as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # no such question on this system
        return None
    return round(total / 2**30)
