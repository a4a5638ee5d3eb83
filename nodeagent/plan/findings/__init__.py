"""What is wrong with a machine, the store and the cluster, judged from what was seen: for `nodeagentctl doctor`."""
