"""The document of figures."""

from __future__ import annotations

import json
import os

from benchmarks.lease import CLOCKWORKS, RESULTS
from benchmarks.report import VERDICT, with_soak
from nodeagent.spec.configfile import parse_config

SOAK = "<!-- begin soak -->\n## Hours\n<!-- end soak -->\n"


def test_a_new_document_keeps_the_section_of_the_soak() -> None:
    assert with_soak("# New\n", f"# Old\n\n{SOAK}") == f"# New\n\n{SOAK}"
    assert with_soak("# New\n", "# Old\n") == "# New\n"


def test_the_shorter_clockwork_can_be_copied_and_is_the_one_of_the_second_row() -> None:
    (line,) = [line.strip() for line in VERDICT.splitlines() if line.strip().startswith("timing:")]
    assert parse_config(line, "nodeagent.yaml", {}, uid=os.getuid()).timing == CLOCKWORKS[1]
    assert CLOCKWORKS[1].problems() == []
    second = json.loads(RESULTS.read_text())["clockworks"][1]["timing"]
    assert second == {key: getattr(CLOCKWORKS[1], key) for key in second}
