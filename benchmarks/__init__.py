"""What gradsurgeon costs, measured on the machine at hand: ``python -m benchmarks`` in a checkout."""
