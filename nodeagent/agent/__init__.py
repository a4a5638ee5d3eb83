"""The daemon: observe, plan, apply."""
