"""What a session keeps of a run: rows of records, copies of tensors, and the log of events."""
