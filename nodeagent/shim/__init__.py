"""One small process for each pod: it owns the pod's workers, fences them, and outlives the agent."""
