"""docs/performance.md says what is kept under benchmarks/results."""

from benchmarks import document


def test_the_document_holds_what_is_kept() -> None:
    """`python -m benchmarks.document --write` brings it up to date."""
    assert document.DOCUMENT.read_text() == document.document()
