"""How queues share a cluster: what each has used, what it may have, and who gives back."""
