"""Read Excel workbooks (``.xlsx``: a zip of XML sheets) row by row, with only one row in memory."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from simdev.errors import InvalidInput

MAX_PART = 1 << 28  # a sheet that unpacks to more is refused
MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
LINK = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"


def sheet_rows(path: str | Path) -> Iterator[tuple[str, int, dict[str, str | float]]]:
    """Yield ``(sheet, row number, {column letters: value})`` for each row that is not empty. Numbers are floats.

    Raises :class:`InvalidInput` if the file is not a workbook, is truncated, or has a sheet of over 256 MiB.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            texts = _shared_strings(archive, path)
            for name, part in _sheets(archive, path):
                for row in _elements(archive, part, "row", path):
                    cells = {_column(cell): _value(cell, texts) for cell in row.iter(f"{MAIN}c")}
                    found = {column: value for column, value in cells.items() if value not in (None, "")}
                    if found:
                        yield name, int(row.get("r", 0)), found
    except OSError as error:
        raise InvalidInput(error.strerror or str(error), source=path) from None
    except (zipfile.BadZipFile, ElementTree.ParseError, KeyError, ValueError, EOFError) as error:
        raise InvalidInput(f"not a readable workbook ({error})", source=path) from None


def _sheets(archive: zipfile.ZipFile, path) -> list[tuple[str, str]]:
    targets = {}
    for relation in ElementTree.fromstring(_part(archive, "xl/_rels/workbook.xml.rels", path).read()):
        targets[relation.get("Id")] = relation.get("Target", "").removeprefix("/xl/")
    book = ElementTree.fromstring(_part(archive, "xl/workbook.xml", path).read())
    sheets = [(sheet.get("name", ""), targets[sheet.get(LINK)]) for sheet in book.iter(f"{MAIN}sheet")]
    return [(name, f"xl/{target}") for name, target in sheets if target.startswith("worksheets/")]


def _shared_strings(archive: zipfile.ZipFile, path) -> list[str]:
    if "xl/sharedStrings.xml" not in archive.namelist():
        return []
    items = _elements(archive, "xl/sharedStrings.xml", "si", path)
    return ["".join(text.text or "" for text in item.iter(f"{MAIN}t")) for item in items]


def _elements(archive: zipfile.ZipFile, part: str, tag: str, path) -> Iterator[ElementTree.Element]:
    with _part(archive, part, path) as file:
        for _, element in ElementTree.iterparse(file):
            if element.tag == f"{MAIN}{tag}":
                yield element
                element.clear()


def _part(archive: zipfile.ZipFile, part: str, path):
    if archive.getinfo(part).file_size > MAX_PART:
        raise InvalidInput(f"{part} unpacks to over {MAX_PART} bytes: refused", source=path)
    return archive.open(part)


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
    return float(text)
