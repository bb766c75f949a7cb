"""Two runs that should agree: where they part, and by how much more than rounding explains. Needs numpy, not torch."""
