"""The store: Redis and its Lua steps, under one contract. Never decides."""
