"""What a cluster costs Redis and its agents as it grows (docs/scale.md): the production steps on one real Redis."""
