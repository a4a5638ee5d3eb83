"""What is made of an answer that is no supervisor's."""

from __future__ import annotations

import threading
from pathlib import Path
from socketserver import StreamRequestHandler, UnixStreamServer

import pytest

from nodeagent.local.control import AnsweredError, NoSupervisorError, ask


def asked(folder: Path, answer: bytes) -> None:
    """Ask somebody who says this."""

    class Says(StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(answer + b"\n")

    path = folder / "control.sock"
    with UnixStreamServer(str(path), Says) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        try:
            ask(path, {"do": "status"})
        finally:
            thread.join()


@pytest.mark.parametrize(
    "answer", [b"[]", b"{}", b"5", b"no", b"\xff", b'{"ok": false}', b'{"ok": false, "error": "x", "code": []}']
)
def test_what_is_no_answer_is_reported_with_its_socket(tmp_path: Path, answer: bytes) -> None:
    with pytest.raises(NoSupervisorError, match=rf"{tmp_path}/control.sock is not the supervisor of a local cluster"):
        asked(tmp_path, answer)


def test_a_refusal_has_its_code(tmp_path: Path) -> None:
    with pytest.raises(AnsweredError, match="it cannot") as raised:
        asked(tmp_path, b'{"ok": false, "error": "it cannot", "code": 6}')
    assert raised.value.code == 6
