"""The in-memory twin of the store: the same steps as ``scripts/*.lua``, on plain dicts of the frozen records."""
