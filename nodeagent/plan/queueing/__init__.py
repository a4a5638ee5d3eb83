"""The jobs that wait: whose turn it is, for whom nodes are reserved or lent, and when a start is to be expected."""
