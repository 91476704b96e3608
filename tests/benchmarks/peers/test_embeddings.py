"""Vectors of systems are compared before anything is timed."""

import numpy as np
import pytest

from benchmarks.peers.embeddings import check

_WANTED = np.array([[3.0, 4.0], [0.0, 2.0]], np.float32)


def test_vectors_that_differ_in_length_alone_agree() -> None:
    assert check({"float32": _WANTED, "peer": _WANTED / 7}) == {
        "peer": {"with": "float32", "median_cosine": 1.0, "least_cosine": 1.0}
    }


def test_a_system_with_another_vector_is_named_with_the_text() -> None:
    turned = np.array([[3.0, 4.0], [1.0, 1.0]], np.float32)
    with pytest.raises(ValueError, match=r"second and faser .*of text 1, is 0\.7071 and must be 0\.99"):
        check({"faser": _WANTED, "first": _WANTED, "second": turned})
    with pytest.raises(ValueError, match="median cosine is nan"):
        check({"faser": _WANTED, "broken": _WANTED * np.nan})


def test_vectors_that_are_all_a_little_off_are_refused() -> None:
    with pytest.raises(ValueError, match=r"median cosine is 0\.9950"):
        check({"faser": np.array([[1.0, 0.0]]), "peer": np.array([[1.0, 0.1]])})
