"""HTTP: what people and tools may ask of an agent, and who may do what. Never decides about gangs."""
