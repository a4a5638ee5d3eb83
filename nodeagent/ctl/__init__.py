"""The command-line tool: one module per noun. It uses only the API of an agent."""
