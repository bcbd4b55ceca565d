"""Names as labels of pictures."""

from __future__ import annotations


def plain(text: str) -> str:
    """``text`` with dollar signs escaped: matplotlib would read the text between two of them as a formula."""
    return text.replace("$", r"\$")
