"""The step between root's agent and a shim: becomes the job's user, then the shim. It knows nothing of either.

Who starts a process waits until that is executed, and a user may stop what is his at any moment. So the agent executes
this, which is root's until then: nothing that the agent waits for is ever the user's. Standard library only, and little
of that: it delays the start of each pod. Must never touch a file.
"""

import os
import sys

NOT_ALLOWED = 77
"""sysexits' EX_NOPERM: the user may not run the command."""


def main() -> None:
    """The arguments are the user's name, uid, gid and groups, and the command, which then has this process."""
    name, uid, gid, groups, *command = sys.argv[1:]
    os.setgroups([int(group) for group in groups.split(",") if group])
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    try:
        os.execv(command[0], command)
    except PermissionError:
        print(
            f"user {name} may not run the agent's Python, {command[0]}: install nodeagent where every user can read it",
            file=sys.stderr,
        )
        sys.exit(NOT_ALLOWED)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be executed: {error.strerror}")


if __name__ == "__main__":
    main()
