"""What several folders share: patterns, events, the result of a replay, and helpers. No torch."""
