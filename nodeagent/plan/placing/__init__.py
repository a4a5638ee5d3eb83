"""Which nodes a job gets, and how they lie to each other: the gang as a whole or nothing."""
