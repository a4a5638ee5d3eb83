"""``python -m nodeagent.lease RUN_FOLDER [FD]``; see ``main``."""

from nodeagent.osutil.linux import prefer


def begin() -> None:
    prefer()  # before the rest is loaded, which is most of what a start takes: running workers wait for it
    from nodeagent.lease.main import main

    main()


begin()
