"""Pure decisions. No I/O, no clock, no randomness, no logging: time comes in, and every decision says why."""
