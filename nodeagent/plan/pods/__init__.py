"""What one node does for its own pods."""
