"""nodeagent and torchrun side by side, in one run on one machine: recovery, joins, speed and cost at rest."""
