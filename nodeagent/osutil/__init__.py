"""Access to files and sockets of the operating system for a process that has more rights than their owner."""
