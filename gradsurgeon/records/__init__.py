"""Rows, copies and events on their way from the device to memory, run directories and sinks."""
