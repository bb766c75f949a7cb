"""No training at all: a script that never imports torch, and writes down what was imported."""

import json
import pathlib
import sys

rows = [{"step": step, "loss": 1.0 / (step + 1)} for step in range(3)]
for row in rows:
    print(json.dumps(row))
print("optimised", sys.flags.optimize, "assertions", __debug__, "arguments", len(sys.argv))
pathlib.Path(sys.argv[1]).write_text(json.dumps(sorted(sys.modules)))
