"""`gradsurgeon run`: rules on a training script that nobody edits.

In the order in which things happen: `command` reads the command line, asks `interpreters` whether rules
can get into what is run, puts `settings` into the environment and replaces itself by plain Python, or by
a command whose end `observer` waits for; there `bootstrap/sitecustomize.py` waits, through
`importing`, for torch. `watch` then waits for optimizers and forward passes, `discovery` finds the models
they belong to, `models` attaches the rules to these, `telling` writes the header and the summary, `warned`
the warnings and what is logged, and `ending` sees to it that the summary comes, however the process ends: `terminating` by a
signal, `debugger` by a trap. `idle` says where no rule acted at all, by the `mark` that others have left.

Nothing here imports torch, or anything that is slow to import, before the script has imported torch.
"""
