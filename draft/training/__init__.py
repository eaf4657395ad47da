"""Training of the proposers that are models: from what the target itself says, to a checkpoint others can load."""
