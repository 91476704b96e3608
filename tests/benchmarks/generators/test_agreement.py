"""Whether a tool's figures agree with the server's: equal counts, stated reasons, bounds of latencies.

Planted bugs that these tests catch: a reason that is taken for any difference; a latency that may be far below
the server's; the tokens of the chat template added once instead of once a request.
"""

from dataclasses import replace

import pytest

from benchmarks.generators.agreement import Check, Finding, ServerMetrics, compare
from benchmarks.generators.tool import Drafts, Figures, Latency
from faser.config.speculation import SpeculationConfig
from faser.metrics.server import Metrics
from faser.types.answer import FinishReason
from faser.types.statistics import EngineStats, MethodStats, SpeculationStats

_TEMPLATE_TOKENS = 30
_DRAFTS = Drafts(drafts=3, draft_tokens=12, accepted_tokens=5, by_position=(1.0, 2 / 3))
_FIGURES = Figures(completed=4, input_tokens=376, output_tokens=80)


def served(*, stop: int = 1, aborted: int = 0, step_s: float = 0.02) -> ServerMetrics:
    """The metrics of four answered requests of 94 and 20 tokens, `stop` of them ended by a token, in two steps."""
    metrics = Metrics(model_name="tiny", max_model_len=128, speculation=SpeculationConfig())
    speculation = SpeculationStats(
        policy="faser",
        method="text",
        num_drafts=3,
        accepted_at=(("default", (3, 2)),),
        methods=(MethodStats(method="ngram", verified=12, accepted=5),),
    )
    metrics.engine(EngineStats(prompt_tokens=4 * 94, generation_tokens=4 * 20, speculation=speculation))
    for number in range(4 + aborted):
        reason = FinishReason.STOP if number < stop else FinishReason.LENGTH
        metrics.first_token(0.2)
        for _ in range(2):
            metrics.tokens(10, step_s)
        metrics.finished(
            FinishReason.ABORT if number >= 4 else reason,
            ttft_s=0.2,
            e2e_s=0.2 + 2 * step_s,
            queue_s=0.0,
            prefill_s=0.2,
            decode_s=2 * step_s,
            prompt_tokens=94,
            cached_tokens=0,
            generation_tokens=20,
            longest_generation=20,
            preemptions=0,
        )
    return ServerMetrics.parse(metrics.render().decode())


def found(checks: list[Check], what: str) -> Check:
    (check,) = (each for each in checks if each.what == what)
    return check


def outcomes(figures: Figures, server: ServerMetrics) -> set[Finding]:
    return {each.outcome for each in compare(figures, server, _TEMPLATE_TOKENS)}


def test_equal_counts_agree_and_any_other_count_does_not() -> None:
    assert outcomes(replace(_FIGURES, drafts=_DRAFTS), served()) == {Finding.EQUAL}
    for wrong in (
        replace(_FIGURES, completed=5),
        replace(_FIGURES, failed=1),
        replace(_FIGURES, input_tokens=377),
        replace(_FIGURES, output_tokens=79),
        replace(_FIGURES, drafts=replace(_DRAFTS, drafts=4)),
        replace(_FIGURES, drafts=replace(_DRAFTS, accepted_tokens=4)),
        replace(_FIGURES, drafts=replace(_DRAFTS, by_position=(1.0, 1.0))),
    ):
        assert Finding.DIFFERS in outcomes(wrong, served())


def test_a_request_before_the_measurement_explains_its_own_tokens_and_no_others() -> None:
    also = Figures(completed=1, input_tokens=94, output_tokens=20)
    measured = Figures(completed=3, input_tokens=282, output_tokens=60, also_sent=also)
    assert outcomes(measured, served()) == {Finding.EXPLAINED, Finding.EQUAL}
    assert Finding.DIFFERS in outcomes(replace(measured, output_tokens=59), served())
    assert Finding.DIFFERS in outcomes(replace(measured, completed=2), served())


@pytest.mark.parametrize(
    "own, outcome", [(256, Finding.EXPLAINED), (257, Finding.DIFFERS), (346, Finding.DIFFERS)]
)
def test_the_chat_template_explains_its_tokens_once_a_request(own: int, outcome: Finding) -> None:
    checks = compare(replace(_FIGURES, own_input_tokens=own, in_chat=True), served(), _TEMPLATE_TOKENS)
    assert found(checks, "input tokens, the tool's tokenizer").outcome is outcome


@pytest.mark.parametrize(
    "own, outcome", [(80, Finding.EQUAL), (79, Finding.EXPLAINED), (78, Finding.EXPLAINED), (70, Finding.DIFFERS)]
)
def test_texts_may_lack_the_token_that_ends_them(own: int, outcome: Finding) -> None:
    """One answer ends with such a token; one more is 1.25 % of the tokens, which retokenising may give."""
    checks = compare(replace(_FIGURES, own_output_tokens=own), served(stop=1), _TEMPLATE_TOKENS)
    assert found(checks, "output tokens, the tool's tokenizer").outcome is outcome


@pytest.mark.parametrize(
    "mean_s, outcome",
    [(0.19, Finding.DIFFERS), (0.2, Finding.WITHIN), (0.27, Finding.WITHIN), (0.29, Finding.DIFFERS)],
)
def test_a_client_sees_the_first_token_no_earlier_and_little_later(mean_s: float, outcome: Finding) -> None:
    ttft = Latency(count=4, mean_s=mean_s, percentiles={})
    checks = compare(replace(_FIGURES, ttft=ttft), served(), _TEMPLATE_TOKENS)
    assert found(checks, "TTFT, mean").outcome is outcome


@pytest.mark.parametrize(
    "p50_s, outcome", [(0.05, Finding.DIFFERS), (0.2, Finding.WITHIN), (0.5, Finding.DIFFERS)]
)
def test_a_percentile_lies_in_the_servers_bucket_or_little_above(p50_s: float, outcome: Finding) -> None:
    ttft = Latency(count=4, mean_s=0.2, percentiles={50: p50_s})
    checks = compare(replace(_FIGURES, ttft=ttft), served(), _TEMPLATE_TOKENS)
    assert found(checks, "TTFT, p50").outcome is outcome


def test_gaps_of_tokens_and_of_silent_ends_are_explained_and_other_missing_gaps_are_not() -> None:
    server = served(stop=1)
    for count, outcome in (
        (8, Finding.EQUAL),
        (76, Finding.EXPLAINED),
        (7, Finding.EXPLAINED),
        (6, Finding.DIFFERS),
    ):
        figures = replace(_FIGURES, chunks=Latency(count=count, mean_s=0.02, percentiles={}))
        assert found(compare(figures, server, _TEMPLATE_TOKENS), "chunk gaps").outcome is outcome


def test_clients_that_left_are_the_servers_aborts_or_had_their_answer() -> None:
    figures = Figures(completed=4, cancelled=2, input_tokens=0, output_tokens=0)
    assert outcomes(figures, served(aborted=2)) == {Finding.EQUAL}
    assert outcomes(replace(figures, completed=3, cancelled=3), served(aborted=2)) == {Finding.EXPLAINED}
    assert Finding.DIFFERS in outcomes(replace(figures, cancelled=3), served(aborted=2))
