"""``python -m benchmarks``."""

from __future__ import annotations

import os
import sys

# Torch and its profiler have a line for every profile, some of them warnings that memory was in use when
# it began. They read this when they are imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from benchmarks.cli import main

sys.exit(main())
