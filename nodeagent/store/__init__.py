"""The store: Redis, its Lua steps and its in-memory twin, under one contract. Never decides."""
