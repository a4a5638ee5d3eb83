"""Looking for what is wrong: this machine, the store, the peers. Judging is ``plan/``'s."""
