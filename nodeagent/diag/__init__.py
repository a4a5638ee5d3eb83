"""Checks of the hardware by work: matrix products, memory, copies, a collective; and what their figures mean."""
