"""``python -m nodeagent.shim FOLDER [FD]``; see ``main``."""

from nodeagent.shim.main import main

main()
