"""The HTTP API of an agent: its requests and answers, and the permissions of its callers. Never decides about gangs."""
