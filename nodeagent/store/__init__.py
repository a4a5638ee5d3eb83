"""The store: Redis and its Lua steps, under one contract. The store checks and writes; it never decides."""
