"""A rank that hangs: how it is noticed, and what each rank does meanwhile."""
