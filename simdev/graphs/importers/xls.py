"""Reads the first sheet of an Excel 97 workbook (``.xls``): a compound file with a stream of BIFF8 records.

Only what tables of numbers and texts need: no formats, no dates, no macros. A formula gives its stored number.
"""

from __future__ import annotations

import struct

from simdev.errors import InvalidInput

MAGIC = bytes.fromhex("d0cf11e0a1b11ae1")
END, FREE = 0xFFFFFFFE, 0xFFFFFFFF
BOF, EOF, CONTINUE, SST, SHEET = 0x0809, 0x000A, 0x003C, 0x00FC, 0x0085
LABEL, NUMBER, RK, MANY_RK, FORMULA = 0x00FD, 0x0203, 0x027E, 0x00BD, 0x0006
MOST_TEXTS = 1 << 20

Cells = dict[tuple[int, int], str | float]


def first_sheet(data: bytes, path) -> Cells:
    """The cells of the first sheet by ``(row, column)``, both from 0; numbers are floats.

    Raises :class:`InvalidInput` if the file is no such workbook or is damaged.
    """
    try:
        stream = _stream(data)
        records = _records(stream)
        texts, start = (
            _texts(records),
            next(struct.unpack_from("<I", body)[0] for _, kind, body in records if kind == SHEET),
        )
        return _cells([record for record in records if record[0] >= start], texts)
    except (struct.error, IndexError, StopIteration, UnicodeDecodeError, ValueError):
        raise InvalidInput("is no Excel 97 workbook, or is damaged", source=path) from None


def _stream(data: bytes) -> bytes:
    """The stream ``Workbook`` of a compound file."""
    if data[:8] != MAGIC:
        raise ValueError
    shift, small_shift = struct.unpack_from("<HH", data, 30)
    count, first_directory, _, cutoff, first_small = struct.unpack_from("<IIIII", data, 44)
    size = 1 << shift
    if shift not in (9, 12) or small_shift != 6:
        raise ValueError

    def sector(number: int) -> bytes:
        return data[(number + 1) * size : (number + 2) * size]

    tables = [number for number in struct.unpack_from("<109I", data, 76) if number != FREE]
    table = [next_ for number in tables[:count] for next_ in struct.unpack(f"<{size // 4}I", sector(number))]

    def chain(number: int, links: list[int]) -> list[int]:
        found: list[int] = []
        while number < END:
            if len(found) > len(links):
                raise ValueError
            found.append(number)
            number = links[number]
        return found

    directory = b"".join(map(sector, chain(first_directory, table)))
    entries = [directory[at : at + 128] for at in range(0, len(directory), 128)]
    streams = {
        entry[: max(0, struct.unpack_from("<H", entry, 64)[0] - 2)].decode("utf-16-le"): struct.unpack_from(
            "<II", entry, 116
        )
        for entry in entries
        if entry[66] in (2, 5)
    }
    start, length = streams["Workbook"] if "Workbook" in streams else streams.get("Book", (0, -1))
    if length < 0:
        raise ValueError
    if length >= cutoff:
        return b"".join(map(sector, chain(start, table)))[:length]
    small = [next_ for number in chain(first_small, table) for next_ in struct.unpack(f"<{size // 4}I", sector(number))]
    root = b"".join(map(sector, chain(streams["Root Entry"][0], table)))
    return b"".join(root[number * 64 : number * 64 + 64] for number in chain(start, small))[:length]


def _records(stream: bytes) -> list[tuple[int, int, bytes]]:
    """``(offset, kind, body)`` of each record."""
    found, at = [], 0
    while at + 4 <= len(stream):
        kind, length = struct.unpack_from("<HH", stream, at)
        found.append((at, kind, stream[at + 4 : at + 4 + length]))
        at += 4 + length
    return found


def _texts(records: list[tuple[int, int, bytes]]) -> list[str]:
    """The shared texts. A text may go on in the next record, which then begins with its own width."""
    place = next((n for n, (_, kind, _) in enumerate(records) if kind == SST), None)
    if place is None:
        return []
    bodies = [records[place][2]]
    for _, kind, body in records[place + 1 :]:
        if kind != CONTINUE:
            break
        bodies.append(body)
    count = struct.unpack_from("<I", bodies[0], 4)[0]
    if count > MOST_TEXTS:
        raise ValueError
    texts, part, at = [], 0, 8
    for _ in range(count):
        if at >= len(bodies[part]):
            part, at = part + 1, 0
        length, flags = struct.unpack_from("<HB", bodies[part], at)
        at += 3
        runs = struct.unpack_from("<H", bodies[part], at)[0] if flags & 8 else 0
        at += 2 if flags & 8 else 0
        extra = struct.unpack_from("<I", bodies[part], at)[0] if flags & 4 else 0
        at += 4 if flags & 4 else 0
        text, wide = "", flags & 1
        while len(text) < length:
            if at >= len(bodies[part]):
                part, at = part + 1, 1
                wide = bodies[part][0] & 1
            step = 2 if wide else 1
            taken = min(length - len(text), (len(bodies[part]) - at) // step)
            if taken == 0:
                raise ValueError
            piece = bodies[part][at : at + taken * step]
            text += piece.decode("utf-16-le" if wide else "latin-1", errors="replace")
            at += taken * step
        skip = 4 * runs + extra
        while skip > len(bodies[part]) - at:
            skip -= len(bodies[part]) - at
            part, at = part + 1, 0
        at += skip
        texts.append(text)
    return texts


def _cells(records: list[tuple[int, int, bytes]], texts: list[str]) -> Cells:
    """The cells of the sheet that the first of ``records`` begins."""
    cells: Cells = {}
    for _, kind, body in records:
        if kind == EOF:
            break
        if kind in (LABEL, NUMBER, RK, FORMULA):
            row, column = struct.unpack_from("<HH", body)
            if kind == LABEL:
                cells[row, column] = texts[struct.unpack_from("<I", body, 6)[0]]
            elif kind == RK:
                cells[row, column] = _rk(struct.unpack_from("<I", body, 6)[0])
            elif kind == NUMBER or body[12:14] != b"\xff\xff":  # a formula with a text keeps it elsewhere
                cells[row, column] = struct.unpack_from("<d", body, 6)[0]
        elif kind == MANY_RK:
            row, first = struct.unpack_from("<HH", body)
            for number in range((len(body) - 6) // 6):
                cells[row, first + number] = _rk(struct.unpack_from("<I", body, 6 + 6 * number)[0])
    return cells


def _rk(value: int) -> float:
    """A number in Excel's short form: 30 bits, whole or the top of a float, perhaps in hundredths."""
    if value & 2:
        number = float((value - (1 << 32) if value & 0x80000000 else value) >> 2)
    else:
        number = struct.unpack("<d", struct.pack("<Q", (value & 0xFFFFFFFC) << 32))[0]
    return number / 100 if value & 1 else number
