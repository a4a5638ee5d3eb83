"""Whether this machine and its GPUs can be trusted with work."""
