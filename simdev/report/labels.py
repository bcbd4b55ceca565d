"""Names as labels of pictures."""

from __future__ import annotations


def plain(text: str) -> str:
    """``text`` as matplotlib draws it literally: between two dollar signs it would draw a formula, or fail."""
    return text.replace("$", r"\$")
