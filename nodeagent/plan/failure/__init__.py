"""What went wrong in a generation: who is to blame, what the policies say, and what lasts too long."""
