"""Records that agents exchange: job specs, nodes, worlds, events. Frozen, typed, versioned; no I/O, no decisions."""
