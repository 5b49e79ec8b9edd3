from __future__ import annotations

import numpy as np

from shardlib.training import measures


def test_bigram_counts_by_hand():
    a, b = ord("a"), ord("b")
    text = {"inputs": np.array([[a, a]], np.int32), "targets": np.array([[a, b]], np.int32)}
    table = measures.fit([text])
    np.testing.assert_allclose(np.exp(table[a, [a, b, 0]]), [2 / 258, 2 / 258, 1 / 258])
    np.testing.assert_allclose(np.exp(table).sum(1), 1)
    other = {"inputs": np.array([[a, b]]), "targets": np.array([[b, a]])}
    np.testing.assert_allclose(
        measures.cross_entropy(table, [text, other]),
        -np.mean([np.log(2 / 258), np.log(2 / 258), np.log(2 / 258), np.log(1 / 256)]),
    )
