"""``python -m benchmarks``."""

from __future__ import annotations

import os
import sys

# Torch warns of every profile that begins while memory is in use. It reads this when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from benchmarks.cli import main

sys.exit(main())
