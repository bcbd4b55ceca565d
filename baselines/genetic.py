"""A genetic algorithm over the devices of layers."""

from __future__ import annotations

import numpy as np

from simdev.baselines._search import Incumbent, first_of_unit, layer_of_unit, starts
from simdev.baselines._units import choices, used_devices
from simdev.placers.placer import placer
from simdev.problem.placement import Placement

POPULATION, ELITE, TOURNAMENT = 20, 2, 3
MUTATIONS = 1.5  # mean number of changed genes per child


@placer(
    "genetic",
    version=1,
    family="search",
    searches=True,
    source="Holland, Adaptation in Natural and Artificial Systems, 1975; for device placement: Exprimo (Lie 2020)",
)
def genetic(problem, *, rng, budget):
    """Evolve twenty individuals with one gene per layer, the layer's device, in topological order.

    Parents are chosen by tournaments of three; children come from two-point crossover and one or two mutations; the two
    best individuals are kept. The first generation holds a single device, a contiguous split and random splits.
    Individuals compare by bytes over memory, then by step time.
    """
    allowed = choices(problem)
    begin = starts(problem, allowed)
    best = Incumbent(problem, budget, begin[0])
    genes = _in_topological_order(layer_of_unit(problem), first_of_unit(problem))
    devices, n_genes = used_devices(allowed), int(genes.max()) + 1
    population = [*begin, *(_random_split(rng, genes, n_genes, devices) for _ in range(POPULATION - len(begin)))]
    population = [_repair(individual, begin[0], allowed) for individual in population]
    scores = best.evaluate(np.stack(population)) if budget.open else []
    while budget.open:
        children = [_child(rng, population, scores, genes, n_genes, devices) for _ in range(POPULATION - ELITE)]
        children = [_repair(child, begin[0], allowed) for child in children]
        found = best.evaluate(np.stack(children))
        elite = sorted(range(len(scores)), key=lambda i: scores[i])[:ELITE]
        population = [population[i] for i in elite] + children[: len(found)]
        scores = [scores[i] for i in elite] + found
    return Placement.of_units(problem, best.devices)


def _in_topological_order(group, first):
    """Groups renumbered by their first unit in topological order."""
    earliest = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(earliest, group, first)
    rank = np.empty(len(earliest), np.int64)
    rank[np.argsort(earliest, kind="stable")] = np.arange(len(earliest))
    return rank[group]


def _random_split(rng, genes, n_genes, devices):
    """Genes cut at random into one run for each device, in random device order."""
    cuts = np.sort(rng.integers(0, n_genes + 1, len(devices) - 1))
    return rng.permutation(devices)[np.searchsorted(cuts, np.arange(n_genes), side="right")][genes].astype(np.int32)


def _child(rng, population, scores, genes, n_genes, devices):
    mother, father = (_winner(rng, population, scores) for _ in range(2))
    low, high = np.sort(rng.integers(0, n_genes + 1, 2))
    child = np.where((genes >= low) & (genes < high), father, mother).astype(np.int32)
    for _ in range(int(rng.poisson(MUTATIONS))):
        child[genes == rng.integers(n_genes)] = rng.choice(devices)
    return child


def _winner(rng, population, scores):
    drawn = rng.integers(0, len(scores), TOURNAMENT)
    return population[min(drawn.tolist(), key=lambda i: (scores[i], i))]


def _repair(individual, fallback, allowed):
    return np.where(allowed[individual, np.arange(len(individual))], individual, fallback).astype(np.int32)
