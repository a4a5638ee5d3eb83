"""The tool: one file per noun, speaking to an agent's API only."""
