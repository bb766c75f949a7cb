"""What rules would have done in a recorded run. Needs numpy."""
