"""The document of figures."""

from __future__ import annotations

from benchmarks.report import with_soak

SOAK = "<!-- begin soak -->\n## Hours\n<!-- end soak -->\n"


def test_a_new_document_keeps_the_section_of_the_soak() -> None:
    assert with_soak("# New\n", f"# Old\n\n{SOAK}") == f"# New\n\n{SOAK}"
    assert with_soak("# New\n", "# Old\n") == "# New\n"
