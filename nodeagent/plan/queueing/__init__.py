"""The jobs that wait: whose turn it is, for whom nodes are kept or lent, and when a start is to be expected."""
