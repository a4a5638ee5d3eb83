"""The fork server: an interpreter that has imported what a job preloads, and forks its workers within milliseconds."""
