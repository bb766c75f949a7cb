"""From text to a program: rule files are read, checked, bound to a model and compiled. Pure, and without torch."""
