"""Signatures that agents trust: the cluster's key, and what it signs."""
