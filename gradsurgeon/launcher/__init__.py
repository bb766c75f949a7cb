"""`gradsurgeon run`: rules on a training script that nobody edits.

In the order in which things happen: `command` reads the command line, puts `settings` into the environment
and replaces itself by plain Python, or by a command. There
`bootstrap/sitecustomize.py` waits, through `importing`, for torch. `training_detector` then waits for
optimizers, or for weights that change without one, `discovery` finds the models they belong to, and `models`
attaches the rules to these. `summary` writes the header and the summary, `warning_lines` shows warnings and
what is logged, all by way of `messages`. `script_end` sees to it that the summary comes, however the process
ends: by itself, by a signal (`sigterm`), or by a trap (`debugger`). Where no rule acted at all, the
`launch_status` of all processes tells why, and what the exit code is.

Nothing here imports torch, or anything that is slow to import, before the script has imported torch.
"""
