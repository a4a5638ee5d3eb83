"""Checks of the hardware by real work: matrix products, memory, copies, a collective; and how their figures are
judged."""
