"""Which devices this machine has, and whether they and the machine can be trusted with work. Optional: an agent without
any of it, and on a machine without a device, runs work on CPU slots."""
