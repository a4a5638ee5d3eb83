"""Worker processes: the shim that owns them, the standby that forks them, their environments and output."""
