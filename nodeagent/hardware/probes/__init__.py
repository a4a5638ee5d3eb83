"""What reads the devices and the machine: processes of their own, and the agent's side of them. Judges nothing."""
