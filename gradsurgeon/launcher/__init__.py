"""`gradsurgeon run`: rules on a training script that you leave untouched.

In order of events: `command` reads the command line, puts `settings` into the environment, and replaces
itself by plain Python or by a command. There `bootstrap/sitecustomize.py` waits, through `importing`, for
torch. `training_detector` then waits for optimizers and shows log lines. `discovery` finds their models, and `models`
attaches the rules, resuming an earlier run if asked. `summary` words the header and the summary, which `models` and,
at the end of the process, `script_end` write through `messages`; `debugger` opens at a trap. If no rule acted at all,
`messages` says so.

Before the script imports torch, nothing here imports torch or any other slow module.
"""
