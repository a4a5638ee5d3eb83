"""Whose word counts: the cluster's key, and what it signs."""
