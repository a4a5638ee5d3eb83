"""``python -m nodeagent.lease RUN_FOLDER [FD]``; see ``main``."""

from nodeagent.lease.main import main

main()
