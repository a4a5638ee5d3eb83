"""The lease process: renews the node's lease and grants its pods their time, whatever becomes of the agent."""
