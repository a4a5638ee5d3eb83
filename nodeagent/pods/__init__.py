"""The agent's side of the pods: it starts their shims, talks to them, and finds their folders, users and logs."""
