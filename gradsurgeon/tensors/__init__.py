"""Computation on tensors of any layout and device, and the search for tensors in module outputs."""
