#!/usr/bin/env python3
"""Trains by the module of trainer.cpp on one, two and four ranks, and holds losses and weights to the same steps in NumPy."""
import numpy
import trainer

IN, OUT, ROWS, STEPS, LR = 16, 10, 24, 40, 0.5
random = numpy.random.default_rng(1)
truth = random.standard_normal((OUT, IN), dtype=numpy.float32)
start = numpy.zeros((OUT, IN), numpy.float32)


def batches():
    made = numpy.random.default_rng(2)
    for _ in range(STEPS):
        x = made.standard_normal((ROWS, IN), dtype=numpy.float32)
        yield x, x @ truth.T


expected, losses = start.astype(numpy.float64), []
for x, y in batches():
    error = x.astype(numpy.float64) @ expected.T - y
    losses.append((error**2).mean())
    expected -= LR * 2 / error.size * error.T @ x
for ranks in (1, 2, 4):
    found, weights = trainer.fit(batches(), start, LR, ranks)
    weights = numpy.array(weights, numpy.float32).reshape(OUT, IN)
    # A sum has at most ROWS OUT = 240 terms, and a step moves a weight by less than 1: STEPS times 240 roundings of f32.
    bound = STEPS * 240 * 2.0**-24
    assert len(found) == STEPS and found[-1] < 0.1 * found[0], found
    assert abs(weights - expected).max() < bound * abs(expected).max(), abs(weights - expected).max()
    assert max(abs(a - b) / losses[0] for a, b in zip(found, losses)) < bound, found
    print(f"{ranks} ranks: the loss fell from {found[0]:.3f} to {found[-1]:.5f}, as in NumPy; no batch was copied")
for bad, says in (([(start[:5], start[:5])], "which 2 ranks divide"), (iter([1]), "indexing")):
    try:
        trainer.fit(bad, start, LR, 2)
        raise SystemExit("a bad batch was not refused")
    except (RuntimeError, TypeError) as error:
        assert says in str(error), error
