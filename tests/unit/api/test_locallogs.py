"""How many may read logs here at a time."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from nodeagent.api.auth import Caller
from nodeagent.api.errors import ApiError
from nodeagent.api.locallogs import Readers


def caller(uid: int) -> Caller:
    return Caller(uid, uid, f"user{uid}", operator=False, trusted=False)


def test_a_user_reads_so_often_at_once_and_all_of_them_so_often() -> None:
    readers = Readers(per_user=2, most=3)
    with ExitStack() as stack:
        for uid in (1, 1, 2):
            stack.enter_context(readers.admit(caller(uid)))
        with pytest.raises(ApiError, match="user user1 reads logs 2 times") as refused, readers.admit(caller(1)):
            pass
        assert (refused.value.status, bool(refused.value.next_step)) == (429, True)
        with pytest.raises(ApiError, match="logs are read 3 times"), readers.admit(caller(2)):
            pass
    for _ in range(5):  # whoever ended counts no more
        with readers.admit(caller(1)), readers.admit(caller(1)), readers.admit(caller(3)):
            pass
