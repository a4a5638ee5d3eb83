"""Looks for problems of this machine, the store and the peers. ``plan/`` judges what is found."""
