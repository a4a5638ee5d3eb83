"""What the operating system's files and sockets ask of whoever uses them with more rights than their owner."""
