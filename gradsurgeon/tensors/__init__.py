"""What is computed on tensors of any layout and device, and how they are found in outputs of modules."""
