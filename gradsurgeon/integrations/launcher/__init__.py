"""`gradsurgeon run`: rules on a training script that you leave untouched.

`command` becomes plain Python, where `bootstrap/sitecustomize.py` waits for torch, and `training_detector` for optimizers.
Before the script imports torch, nothing here imports torch or any other slow module.
"""
