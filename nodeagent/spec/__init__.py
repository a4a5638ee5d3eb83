"""What people write: job files and agent configs; every mistake at once, with its place and what would be right."""
