"""`gradsurgeon run`: rules on a training script that you leave untouched.

In order of events: `command` reads the command line, puts `settings` into the environment, and replaces
itself by plain Python or by a command. There `bootstrap/sitecustomize.py` waits, through `importing`, for
torch. `training_detector` then waits for optimizers, or for weights that change without one. `discovery`
finds their models, and `models` attaches the rules, resuming an earlier run if asked. `summary` writes the
header and the summary; `warning_lines` shows warnings and log lines; both write through `messages`.
`script_end` writes the summary however the process ends: by itself, by a signal (`sigterm`), or by a trap
(`debugger`). If no rule acted at all, `launch_status` says why and decides the exit code.

Before the script imports torch, nothing here imports torch or any other slow module.
"""
