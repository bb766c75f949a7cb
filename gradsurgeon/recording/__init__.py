"""The records of a run: rows of measurements, copies of tensors, and the log of events."""
