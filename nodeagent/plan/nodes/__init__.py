"""What each node offers a job, and who of a job's generation is alive there."""
