"""The cluster's key: one secret file, the same on every node, that only the agents can read.

Reads and makes the file, and signs with keys that are derived from it, one for each purpose: a signature for one
purpose is never valid for another. Must never return the key itself, or repeat it in a message.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from nodeagent.osutil.linux import open_plain, sync_folder

KEY_BYTES = 32
"""The fewest bytes of a key, and the number that ``make`` writes."""
LARGEST_FILE = 4096
_HEX = re.compile(r"([0-9a-fA-F]{2})+")


class KeyFileError(Exception):
    """A key file that cannot be used or made. ``str()`` says which, why, and what to do."""


class ClusterKey:
    """The key in memory. Two nodes with the same file make the same signatures."""

    __slots__ = ("_derived", "_key")

    def __init__(self, key: bytes) -> None:
        if len(key) < KEY_BYTES:
            raise ValueError(f"a cluster key has at least {KEY_BYTES} bytes, this one has {len(key)}")
        self._key = key
        self._derived: dict[str, bytes] = {}

    @classmethod
    def load(cls, path: Path) -> ClusterKey:
        """The key in a file: hex or base64 text, on one line. Raises ``KeyFileError``; also for a file that users other
        than its owner can read or change, and for one that belongs neither to root nor to this process's user."""
        how = f"make one with `nodeagent keygen {path}` on one node, and copy it to every node of the cluster"
        try:
            with open_plain(path) as file:
                status = os.fstat(file.fileno())
                data = file.read(LARGEST_FILE + 1)
        except FileNotFoundError:
            raise KeyFileError(f"there is no cluster key at {path}: {how}") from None
        except OSError as error:
            raise KeyFileError(f"the cluster key {path} cannot be read: {error.strerror}") from None
        if status.st_uid not in (0, os.geteuid()):
            raise KeyFileError(
                f"the cluster key {path} belongs to uid {status.st_uid}, who could change it: "
                f"run chown {os.geteuid()} {path}, if you trust what it holds"
            )
        mode = stat.S_IMODE(status.st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise KeyFileError(
                f"the cluster key {path} has mode {mode:04o}, so others than its owner can read or change it: a user "
                f"who has it can run commands on every node. Make a new one for all nodes, or, if no one has read it, "
                f"run chmod 0600 {path}"
            )
        try:
            return cls(_decoded(data))
        except ValueError as error:
            raise KeyFileError(f"{path} does not hold a cluster key ({error}): {how}") from None

    def derive(self, purpose: str) -> bytes:
        """A separate key for one purpose; there are a handful of purposes."""
        if purpose not in self._derived:
            self._derived[purpose] = hmac.digest(self._key, b"nodeagent/1/" + purpose.encode(), hashlib.sha256)
        return self._derived[purpose]

    def sign(self, purpose: str, payload: bytes) -> str:
        """The signature of these bytes, as text."""
        return hmac.digest(self.derive(purpose), payload, hashlib.sha256).hex()

    def verify(self, purpose: str, payload: bytes, signature: str) -> bool:
        """Returns whether ``sign`` made this signature of these bytes for this purpose, with this key."""
        return hmac.compare_digest(self.sign(purpose, payload).encode(), signature.encode())

    def __repr__(self) -> str:
        return "ClusterKey(...)"


def make(path: Path) -> None:
    """Write a new key, mode 0600, whole or not at all, and wait until it is on the disk; makes the folder if it is
    missing. Raises ``KeyFileError``, even if there is a file already."""
    try:
        named = [path.parent, *(folder.parent for folder in path.parents if not folder.exists())]
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(handle, "w") as file:
                os.fchmod(file.fileno(), 0o600)  # independent of the umask
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            _put(draft, path)
        finally:
            draft.unlink()
        try:
            for folder in named:
                sync_folder(folder)
        except OSError:
            path.unlink()
            raise
    except OSError as error:
        raise KeyFileError(f"no key can be written to {path}: {error.strerror}") from None


def _put(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)  # unlike a rename, a link never replaces another file
    except FileExistsError:
        raise KeyFileError(
            f"{path} exists already: nothing was changed. Every node of a cluster needs the same key; to replace it, "
            f"remove it everywhere first"
        ) from None


def _decoded(data: bytes) -> bytes:
    if len(data) > LARGEST_FILE:
        raise ValueError(f"it has more than {LARGEST_FILE} bytes")
    try:
        text = data.decode("ascii").strip()
        key = bytes.fromhex(text) if _HEX.fullmatch(text) else base64.b64decode(text, validate=True)
    except (UnicodeDecodeError, binascii.Error):
        raise ValueError("neither hex nor base64 on one line") from None
    if len(key) < KEY_BYTES:
        raise ValueError(f"it has {len(key)} bytes, at least {KEY_BYTES} are needed")
    return key
