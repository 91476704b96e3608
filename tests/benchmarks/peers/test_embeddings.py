"""Vectors of systems are compared before anything is timed."""

import numpy as np
import pytest

from benchmarks.peers.embeddings import check

_WANTED = np.array([[3.0, 4.0], [0.0, 2.0]], np.float32)


def test_vectors_that_differ_in_length_alone_agree(capsys: pytest.CaptureFixture[str]) -> None:
    check({"faser": _WANTED, "peer": _WANTED / 7}, 0.999)
    assert "least cosine of peer with faser: 1.00000" in capsys.readouterr().out


def test_a_system_with_another_vector_is_named_with_the_text() -> None:
    turned = np.array([[3.0, 4.0], [1.0, 1.0]], np.float32)
    with pytest.raises(ValueError, match=r"vectors of text 1 by second and faser have a cosine of 0\.7071"):
        check({"faser": _WANTED, "first": _WANTED, "second": turned}, 0.999)
    with pytest.raises(ValueError, match="cosine of nan"):
        check({"faser": _WANTED, "broken": _WANTED * np.nan}, 0.999)
