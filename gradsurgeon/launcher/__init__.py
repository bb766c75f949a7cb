"""`gradsurgeon run`: rules on a training script that nobody edits.

In the order in which things happen: `command` reads the command line, puts `settings` into the
environment and replaces itself by plain Python; there `bootstrap/sitecustomize.py` waits, through
`importing`, for torch. `watch` then waits for optimizers and forward passes, `discovery` finds the models
they belong to, `models` attaches the rules to these, `telling` writes the header and the summary, and
`ending` sees to it that the summary comes, however the process ends.

Nothing here imports torch, or anything that is slow to import, before the script has imported torch.
"""
