"""A development cluster of real agents on this machine, supervised as systemd would."""
