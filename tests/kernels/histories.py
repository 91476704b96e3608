"""Steps as an engine makes them, and shapes of attention, drawn at random."""

from dataclasses import replace

from hypothesis import strategies as st

from faser.kernels.interface.shapes import AttentionShape
from tests.kernels.layouts import Span, attention_shape

NUM_SEQUENCES = 3
MOST_ROWS = 20  # of a sequence in a step
# Each step: rows of some of three sequences, which grow from step to step.
Steps = list[list[Span]]


@st.composite
def histories(draw: st.DrawFn, most_steps: int = 4) -> Steps:
    """Some steps over three sequences; now and then a refused tail is computed again."""
    lengths = [0] * NUM_SEQUENCES
    steps = []
    for _ in range(draw(st.integers(1, most_steps))):
        members = draw(
            st.lists(st.integers(0, NUM_SEQUENCES - 1), min_size=1, max_size=NUM_SEQUENCES, unique=True)
        )
        most = draw(st.sampled_from([1, 3, MOST_ROWS]))
        spans = []
        for member in members:
            start = max(0, lengths[member] - draw(st.integers(0, 2)))
            spans.append(Span(sequence=member, start=start, rows=draw(st.integers(1, most))))
            lengths[member] = start + spans[-1].rows
        steps.append(spans)
    return steps


@st.composite
def shapes(draw: st.DrawFn) -> AttentionShape:
    group, num_kv_heads = draw(st.sampled_from([(1, 2), (3, 1), (4, 2)]))
    window = draw(st.sampled_from([None, None, 1, 7, 30]))
    return replace(attention_shape(group, num_kv_heads, 64, window), scale=draw(st.sampled_from([0.1, 0.125])))
