"""The device file of a board that nobody measured: ``calibrated = "auto"`` of a device kind.

f32 and elementwise kernels: the file of the newest other training board serves a training board. A board of under
:data:`SMALL_WATTS` takes the next newer small board, or else the training board of its generation, slowed in products
as the newest older small board is against the training board of its own: it has not the power to hold its clock.

Matrix units (bf16, f16, TF32, FP8): power limits the clock of these products, so the file whose board has the most
similar power per peak FLOP/s serves, of the same vendor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log

from simdev.problem.opcost.device import Calibration, ClassFit, calibration_names, load_calibration
from simdev.problem.opcost.physics import GEMM_LIKE

SMALL_WATTS = 100


@dataclass(frozen=True)
class Board:
    """What the rule needs to know: power limit in W, CUDA's compute capability (0: not CUDA), vendor, bf16 FLOP/s (0:
    no matrix units)."""

    watts: float
    capability: float
    vendor: str = "nvidia"
    matrix_flops: float = 0.0


@cache
def stand_in(board: Board, without: str = "") -> Calibration | None:
    """The calibration that stands in for ``board``, as if there were no device file ``without``; None if no file can.

    It has no ``watts``: the rule has allowed for power already.
    """
    files = [load_calibration(name) for name in calibration_names() if name != without]
    measured = [file for file in files if "linear" in file.own and file.capability]
    f32 = _f32(board, sorted(measured, key=lambda file: file.capability)) if board.capability else None
    f32 = f32 or next((file for file in files if file.name == "a100"), None)
    if f32 is None:
        return None
    plain = {name: fit for name, fit in f32.classes.items() if " " not in name}
    teacher = _matrix_teacher(board, files)
    if teacher is None:
        return replace(f32, classes=plain, table={}, watts=0.0)
    slower = _small_share(measured) if board.watts <= SMALL_WATTS else 1.0
    units = {name: _scaled(fit, slower) for name, fit in teacher.classes.items() if " " in name}
    return replace(
        f32, name=" and ".join(dict.fromkeys((f32.name, teacher.name))), classes=plain | units, table={}, watts=0.0
    )


def _scaled(fit: ClassFit, share: float) -> ClassFit:
    return fit if share == 1 else replace(fit, efficiency=fit.efficiency * share)


def _matrix_teacher(board: Board, files: Sequence[Calibration]) -> Calibration | None:
    """The file whose board is most similar in power per FLOP/s of bf16 products."""
    known = [file for file in files if "product bf16" in file.own and file.vendor == board.vendor and file.watts]
    if not known or not board.matrix_flops or not board.watts:
        return None
    power = log(board.watts / board.matrix_flops)
    return min(known, key=lambda file: abs(log(file.watts / file.sheet.rate("bf16")) - power))


def _f32(board: Board, files: Sequence[Calibration]) -> Calibration | None:
    """``files`` rise by capability."""
    large = [file for file in files if file.watts > SMALL_WATTS]
    small = [file for file in files if file.watts <= SMALL_WATTS]
    if board.watts > SMALL_WATTS:
        return large[-1] if large else None
    newer = [file for file in small if file.capability >= board.capability]
    if newer or not large:
        return (newer or small)[0] if small else None
    return _slowed(_sister(board.capability, large), [(file, _sister(file.capability, large)) for file in small])


def _sister(capability: float, large: Sequence[Calibration]) -> Calibration:
    """The training board of a small board's generation: of equal major capability, or the newest before it."""
    return max(large, key=lambda file: (int(file.capability) <= int(capability), file.capability))


def _ratio(name: str, small: Calibration, large: Calibration) -> float:
    """A class's efficiency on a small board over that on a training board; of ``linear`` if one lacks the class."""
    key = name if name in small.classes and name in large.classes else "linear"
    return small.classes[key].efficiency / large.classes[key].efficiency


def _slowed(large: Calibration, pairs: Sequence[tuple[Calibration, Calibration]]) -> Calibration:
    """``large`` with the products of a small board: by the ratio of the newest of ``pairs`` (small board, training
    board of its generation; oldest first). All else is as on the newest small board."""
    classes = dict(large.classes)
    for name in classes:
        if name in GEMM_LIKE and pairs:
            classes[name] = replace(classes[name], efficiency=classes[name].efficiency * _ratio(name, *pairs[-1]))
        elif pairs and name in pairs[-1][0].classes:
            classes[name] = pairs[-1][0].classes[name]
    name = " and ".join([large.name, *(file.name for file, _ in pairs[-1:])])
    return replace(large, name=name, classes=classes, table={})


def _small_share(files: Sequence[Calibration]) -> float:
    """What share of a training board's efficiency in products the newest small board reaches."""
    large = [file for file in files if file.watts > SMALL_WATTS]
    small = [file for file in files if file.watts <= SMALL_WATTS]
    return _ratio("linear", small[-1], _sister(small[-1].capability, large)) if small and large else 1.0
