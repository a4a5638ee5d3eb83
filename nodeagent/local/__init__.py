"""A development cluster of real agents on this machine, supervised in the way that systemd would."""
