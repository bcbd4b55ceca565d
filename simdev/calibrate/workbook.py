"""Read Excel workbooks (``.xlsx``: a zip of XML sheets) row by row, with only one row in memory."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from xml.etree import ElementTree

from simdev.errors import InvalidInput
from simdev.files import MAX_DOCUMENT, Bounded, open_zip

MAX_ROW, MAX_DEPTH = 1 << 17, 50  # elements in a row, and how deep they are nested (Excel has 16,384 columns)
MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
LINK = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"


def sheet_rows(path: str | Path) -> Iterator[tuple[str, int, dict[str, str | float]]]:
    """Yield ``(sheet, row number, {column letters: value})`` for each row that is not empty. Numbers are floats.

    Raises :class:`InvalidInput` if the file is not a workbook, is truncated, has a part of over 128 MiB, or lists a
    sheet twice.
    """
    try:
        yield from _sheet_rows(path)
    except InvalidInput as error:
        raise InvalidInput(f"not a readable workbook ({error.message})", source=path) from None


def _sheet_rows(path: str | Path) -> Iterator[tuple[str, int, dict[str, str | float]]]:
    with open_zip(path) as archive:
        texts = _shared_strings(archive, path)
        for name, part in _sheets(archive, path):
            for row in _elements(archive, part, "row", path):
                cells = {_column(cell): _value(cell, texts) for cell in row.iter(f"{MAIN}c")}
                found = {column: value for column, value in cells.items() if value not in (None, "")}
                if found:
                    yield name, int(row.get("r", 0)), found


def _sheets(archive: zipfile.ZipFile, path) -> list[tuple[str, str]]:
    targets = {}
    for relation in ElementTree.fromstring(_part(archive, "xl/_rels/workbook.xml.rels", path).read()):
        targets[relation.get("Id")] = relation.get("Target", "").removeprefix("/xl/")
    book = ElementTree.fromstring(_part(archive, "xl/workbook.xml", path).read())
    sheets = [(sheet.get("name", ""), targets[sheet.get(LINK)]) for sheet in book.iter(f"{MAIN}sheet")]
    found = [(name, f"xl/{target}") for name, target in sheets if target.startswith("worksheets/")]
    if len({part for _, part in found}) < len(found):
        raise InvalidInput("a sheet is listed twice", source=path)
    return found


def _shared_strings(archive: zipfile.ZipFile, path) -> list[str]:
    if "xl/sharedStrings.xml" not in archive.namelist():
        return []
    items = _elements(archive, "xl/sharedStrings.xml", "si", path)
    return ["".join(text.text or "" for text in item.iter(f"{MAIN}t")) for item in items]


def _elements(archive: zipfile.ZipFile, part: str, tag: str, path) -> Iterator[ElementTree.Element]:
    """The elements of one kind. Nothing of an element is kept after it, so that only one is in memory."""
    above: list[ElementTree.Element] = []
    inside = size = 0
    for event, element in ElementTree.iterparse(_part(archive, part, path), ("start", "end")):
        wanted = element.tag == f"{MAIN}{tag}"
        if event == "start":
            above.append(element)
            inside += wanted
            size += inside > 0
            if len(above) > MAX_DEPTH or size > MAX_ROW:
                raise InvalidInput(f"{part}: a row is too large", source=path)
            continue
        above.pop()
        inside -= wanted
        if not inside:
            size = 0
            if wanted:
                yield element
            if above:
                above[-1].remove(element)


def _part(archive: zipfile.ZipFile, part: str, path) -> Bounded:
    return Bounded(archive.open(part), MAX_DOCUMENT, f"{path}: {part}")


def _column(cell: ElementTree.Element) -> str:
    return re.sub(r"\d", "", cell.get("r", ""))


def _value(cell: ElementTree.Element, texts: list[str]) -> str | float | None:
    if cell.get("t") == "inlineStr":
        return "".join(text.text or "" for text in cell.iter(f"{MAIN}t"))
    text = cell.findtext(f"{MAIN}v")
    if text is None:
        return None
    if cell.get("t") == "s":
        return texts[int(text)]
    if cell.get("t") in ("str", "e", "b"):
        return text
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:40]} is not a number")
    return value
