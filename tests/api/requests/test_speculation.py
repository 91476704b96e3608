"""The speculative field and headers of a request, the parameters in the engine, and the report in the answer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from faser.api.answers.usage import WITHHELD, acceptance
from faser.config.speculation import SpeculationConfig
from faser.types.answer import FinishReason, RequestOutput, SpeculationSummary, StepTrace
from faser.types.request import NO_TARGETS, Request, Slo, SpeculationParams
from tests.api.answers.test_handler import events
from tests.api.server import http_client, openai_client, serving, settings
from tests.fake_engine import FakeEngine, Step, delta, saying

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
OWN = {"cache_salt": "mine"}  # past answers that no other client drafts from: counts are reported
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": HI, **OWN}, TEXT: {"prompt": "hi", **OWN}}
CONFIG = SpeculationConfig(
    num_speculative_tokens=8,
    slo=Slo(ttft_ms=500, tpot_ms=50),
    classes={
        "gold": SpeculationParams(class_name="gold", max_tokens=6, slo=Slo(ttft_ms=500, tpot_ms=20)),
        "batch": SpeculationParams(class_name="batch", enabled=False, max_tokens=8),
    },
)
SUMMARY = SpeculationSummary(
    policy="faser",
    steps=4,
    gamma_sum=10,
    drafts=3,
    drafted=12,
    pruned=2,
    verified=10,
    accepted=6,
    accepted_per_position=(3, 2, 1, 0),
    per_step=((4, 3), (4, 2), (2, 1)),
)
OTHER = SpeculationSummary(
    policy="faser", steps=6, gamma_sum=0, drafts=0, drafted=3, pruned=3, accepted_per_position=(0,) * 4
)


@pytest.fixture(scope="module")
def detailed_engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def url(detailed_engine: FakeEngine) -> Iterator[str]:
    with serving(detailed_engine, settings(speculation=CONFIG, spec_decode_metrics="detailed")) as url:
        yield url


@pytest.fixture
def engine(detailed_engine: FakeEngine) -> FakeEngine:
    detailed_engine.reset()
    return detailed_engine


@pytest.fixture
def http(url: str, engine: FakeEngine) -> Iterator[httpx.Client]:
    del engine  # reset before the first request
    with http_client(url) as client:
        yield client


@pytest.fixture
def client(url: str, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    del engine
    with openai_client(url) as client:
        yield client


DEFAULT = SpeculationParams(max_tokens=8, slo=CONFIG.slo)


def off(base: SpeculationParams = DEFAULT) -> SpeculationParams:
    return SpeculationParams(enabled=False, max_tokens=0, class_name=base.class_name, slo=base.slo)


def capped(cap: int) -> SpeculationParams:
    return SpeculationParams(max_tokens=cap, slo=CONFIG.slo)


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize(
    "body, headers, params",
    [
        (None, {}, DEFAULT),
        ({}, {}, DEFAULT),
        ({"enabled": True}, {}, DEFAULT),
        ({"enabled": "auto"}, {}, DEFAULT),
        ({"enabled": False}, {}, off()),
        ({"enabled": False, "max_tokens": 4}, {}, off()),
        ({"max_tokens": 0}, {}, off()),
        ({"max_tokens": 4}, {}, capped(4)),
        ({"max_tokens": 10**30}, {}, DEFAULT),
        ({"slo": {"tpot_ms": 5}}, {}, SpeculationParams(max_tokens=8, slo=Slo(ttft_ms=500, tpot_ms=5))),
        ({"class": "gold"}, {}, CONFIG.classes["gold"]),
        ({"class": "gold", "max_tokens": 8}, {}, CONFIG.classes["gold"]),
        (
            {"class": "gold", "max_tokens": 2, "slo": {"ttft_ms": 9}},
            {},
            SpeculationParams(class_name="gold", max_tokens=2, slo=Slo(ttft_ms=9, tpot_ms=20)),
        ),
        ({"class": "batch"}, {}, off(CONFIG.classes["batch"])),
        ({"class": "batch", "enabled": "auto"}, {}, off(CONFIG.classes["batch"])),
        ({"class": "batch", "enabled": True}, {}, SpeculationParams(class_name="batch", max_tokens=8)),
        (None, {"X-Faser-Speculative": "off"}, off()),
        (None, {"X-Faser-Speculative": "0"}, off()),
        (None, {"X-Faser-Speculative": "auto"}, DEFAULT),
        (None, {"X-Faser-Speculative": "3"}, capped(3)),
        (None, {"X-Faser-Speculative": "9" * 5000}, DEFAULT),
        (None, {"X-Faser-Class": "gold"}, CONFIG.classes["gold"]),
        ({"enabled": True}, {"X-Faser-Speculative": "off"}, DEFAULT),
        ({"enabled": False}, {"X-Faser-Speculative": "3"}, off()),
        ({"max_tokens": 4}, {"X-Faser-Speculative": "off"}, capped(4)),
        ({"class": "default"}, {"X-Faser-Class": "gold"}, DEFAULT),
        ({"slo": {"tpot_ms": 50}}, {"X-Faser-Speculative": "3"}, capped(3)),
    ],
)
def test_parameters_reach_the_engine_bounded_by_the_operator(
    http: httpx.Client,
    engine: FakeEngine,
    route: str,
    body: dict[str, Any] | None,
    headers: dict[str, str],
    params: SpeculationParams,
) -> None:
    sent = BODIES[route] if body is None else {**BODIES[route], "speculative": body}
    assert http.post(route, json=sent, headers=headers).status_code == 200
    assert engine.requests[0].speculation == params


@pytest.mark.parametrize(
    "body, headers, param",
    [
        ({"class": "silver"}, {}, "speculative.class"),
        ({}, {"X-Faser-Class": "silver"}, "X-Faser-Class"),
    ],
)
def test_an_unknown_class_is_refused_with_those_there_are(
    http: httpx.Client, engine: FakeEngine, body: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    answer = http.post(CHAT, json={"messages": HI, "speculative": body}, headers=headers)
    failure = answer.json()["error"]
    assert (answer.status_code, failure["param"]) == (400, param)
    assert failure["message"] == f"{param} is silver; it must be one of default, gold, batch"
    assert not engine.requests


LLM_D = {"x-llm-d-slo-ttft-ms": "400", "x-llm-d-slo-tpot-ms": "30"}
OBJECTIVE = {"x-llm-d-inference-objective": "gold"}
OF_GOLD = Slo(ttft_ms=500, tpot_ms=20)


@pytest.mark.parametrize(
    "fields, headers, class_name, slo",
    [
        ({}, LLM_D, "default", Slo(ttft_ms=400, tpot_ms=30)),
        ({}, {"x-slo-ttft-ms": "400"}, "default", Slo(ttft_ms=400, tpot_ms=50)),
        ({}, {**LLM_D, "x-slo-ttft-ms": "1"}, "default", Slo(ttft_ms=400, tpot_ms=30)),
        ({"speculative": {"slo": {"ttft_ms": 70}}}, LLM_D, "default", Slo(ttft_ms=70, tpot_ms=30)),
        ({}, OBJECTIVE, "gold", OF_GOLD),
        ({}, {**OBJECTIVE, **LLM_D}, "gold", Slo(ttft_ms=400, tpot_ms=30)),
        ({}, {"x-llm-d-inference-objective": "not-of-this-server"}, "default", CONFIG.slo),
        ({"service_tier": "gold"}, {}, "gold", OF_GOLD),
        ({"service_tier": "flex"}, {}, "default", CONFIG.slo),
        ({"service_tier": "auto"}, OBJECTIVE, "gold", OF_GOLD),
        ({"service_tier": "batch"}, OBJECTIVE, "batch", NO_TARGETS),
        ({"service_tier": "gold"}, {"X-Faser-Class": "batch"}, "batch", NO_TARGETS),
        ({"service_tier": "batch", "speculative": {"class": "gold"}}, OBJECTIVE, "gold", OF_GOLD),
    ],
)
def test_the_names_of_others_stand_for_class_and_targets_and_the_body_wins(
    http: httpx.Client,
    engine: FakeEngine,
    fields: dict[str, Any],
    headers: dict[str, str],
    class_name: str,
    slo: Slo,
) -> None:
    assert http.post(CHAT, json={"messages": HI, **fields}, headers=headers).status_code == 200
    found = engine.requests[0].speculation
    assert (found.class_name, found.slo) == (class_name, slo)


@pytest.mark.parametrize("name", ["x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-ttft-ms"])
@pytest.mark.parametrize("value", ["0", "-5", "soon", "nan", "inf"])
def test_a_target_in_a_header_must_be_a_number_above_0(
    http: httpx.Client, engine: FakeEngine, name: str, value: str
) -> None:
    answer = http.post(CHAT, json={"messages": HI}, headers={name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert answer.json()["error"]["message"] == f"{name} is {value}; it must be a number of milliseconds above 0"
    assert not engine.requests


@pytest.mark.parametrize(
    "fields, priority, tokens",
    [
        ({"nvext": {"agent_hints": {"priority": 5}}}, -5, None),
        ({"nvext": {"agent_hints": {"priority": 5, "osl": 9}}, "priority": 2}, 2, 9),
        ({"nvext": {"agent_hints": {"osl": 9, "strict_priority": False}}}, 0, 9),
        ({"nvext": {}}, 0, None),
    ],
)
def test_hints_of_agents_reach_the_engine_with_the_sign_of_its_priority(
    http: httpx.Client, engine: FakeEngine, fields: dict[str, Any], priority: int, tokens: int | None
) -> None:
    assert http.post(CHAT, json={"messages": HI, **fields}).status_code == 200
    assert (engine.requests[0].priority, engine.requests[0].expected_tokens) == (priority, tokens)


@pytest.mark.parametrize(
    "hints", [{"strict_priority": True}, {"speculative_prefill": True}, {"osl": 0}, {"latency": 3}]
)
def test_hints_that_would_have_no_effect_are_refused(
    http: httpx.Client, engine: FakeEngine, hints: dict[str, Any]
) -> None:
    answer = http.post(CHAT, json={"messages": HI, "nvext": {"agent_hints": hints}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("nvext.agent_hints")
    assert not engine.requests


FASER = {
    "policy": "faser",
    "max_tokens": 4,
    "class": "gold",
    "slo": {"ttft_ms": 500, "tpot_ms": 20},
    "steps": 4,
    "gamma_mean": 2.5,
    "drafted": 12,
    "pruned": 2,
    "verified": 10,
    "accepted": 6,
    "wasted": 4,
}
VLLM = {
    "mean_acceptance_length": 3.0,
    "draft_acceptance_rate": 0.6,
    "acceptance_histogram": [0, 1, 1, 1, 0, 0, 0, 0, 0],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 6,
    "num_draft_tokens": 10,
    "num_spec_tokens": 8,
    "per_step_accepted": [3, 2, 1],
    "per_step_drafted": [4, 4, 2],
}
WISHES = {"class": "gold", "max_tokens": 4}


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_an_answer_reports_what_speculation_did(http: httpx.Client, engine: FakeEngine, route: str) -> None:
    engine.script = saying("Hello!", tokens_per_step=2, summaries=[SUMMARY])
    body = http.post(route, json={**BODIES[route], "speculative": WISHES}).json()
    assert body["metrics"] == {"faser": FASER, "speculative_decoding": VLLM}


def test_several_choices_are_reported_each_and_in_sum(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("Hello!", summaries=[SUMMARY, OTHER])
    metrics = http.post(CHAT, json={**BODIES[CHAT], "n": 2, "speculative": WISHES}).json()["metrics"]
    report = metrics["faser"]
    assert metrics["speculative_decoding"] is None
    assert (report["steps"], report["gamma_mean"], report["drafted"], report["pruned"]) == (10, 1.0, 15, 5)
    assert [each["index"] for each in report["choices"]] == [0, 1]
    assert report["choices"][0] == {"index": 0} | {
        key: FASER[key] for key in FASER if key not in ("policy", "max_tokens", "class", "slo")
    }
    for each in (report, *report["choices"]):
        assert each["drafted"] == each["pruned"] + each["verified"]
        assert each["verified"] == each["accepted"] + each["wasted"]


def test_choices_of_several_prompts_are_reported_by_their_index(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("Hello!", summaries=[SUMMARY])
    report = http.post(TEXT, json={"prompt": ["a", "b", "c"], **OWN}).json()["metrics"]["faser"]
    assert [each["index"] for each in report["choices"]] == [0, 1, 2]
    assert report["accepted"] == 18


def test_a_stream_reports_it_once_in_the_usage_chunk(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("Hello!", summaries=[SUMMARY])
    options = {"stream": True, "stream_options": {"include_usage": True}, "speculative": WISHES}
    payloads = events(http.post(CHAT, json={**BODIES[CHAT], **options}))
    assert [payload.get("metrics") for payload in payloads[:-1]] == [None] * (len(payloads) - 1)
    assert payloads[-1]["choices"] == []
    assert payloads[-1]["usage"]["completion_tokens"] == 6
    assert payloads[-1]["metrics"] == {"faser": FASER, "speculative_decoding": VLLM}


SHARED = {
    "policy": "faser",
    "max_tokens": 4,
    "class": "gold",
    "slo": {"ttft_ms": 500, "tpot_ms": 20},
    "withheld": WITHHELD,
}


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_shares_past_answers_gets_what_was_in_force_and_no_count(
    http: httpx.Client, engine: FakeEngine, route: str, n: int
) -> None:
    engine.script = saying("Hello!", summaries=[SUMMARY, OTHER], cached=16)
    shared = {key: value for key, value in BODIES[route].items() if key != "cache_salt"}
    body = {**shared, "n": n, "speculative": WISHES}
    answer = http.post(route, json=body).json()
    assert answer["metrics"] == {"faser": SHARED, "speculative_decoding": None}
    assert answer["usage"]["prompt_tokens_details"] is None
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    payloads = events(http.post(route, json={**body, **options}))
    assert payloads[-1]["metrics"] == answer["metrics"]
    assert [payload["usage"]["prompt_tokens_details"] for payload in payloads] == [None] * len(payloads)


def test_a_stream_without_usage_does_not_report_it(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("Hello!", summaries=[SUMMARY])
    payloads = events(http.post(CHAT, json={"messages": HI, "stream": True}))
    assert not any("metrics" in payload for payload in payloads)


def test_an_engine_that_does_not_speculate_leaves_no_metrics(http: httpx.Client) -> None:
    assert "metrics" not in http.post(CHAT, json={"messages": HI}).json()


def test_without_the_flag_only_ours_are_reported() -> None:
    engine = FakeEngine(saying("Hello!", summaries=[SUMMARY]))
    with serving(engine, settings(speculation=CONFIG)) as url, http_client(url) as http:
        assert list(http.post(CHAT, json={"messages": HI}).json()["metrics"]) == ["faser"]


def test_summary_has_no_steps_and_a_request_without_drafts_no_rate() -> None:
    report = acceptance(OTHER, 4, detailed=False)
    assert report == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [0] * 5,
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_draft_tokens": 0,
        "num_spec_tokens": 4,
    }


def test_the_histogram_counts_drafts_by_accepted_tokens() -> None:
    """Oracle: the drafts themselves."""
    accepted = [0, 0, 3, 1, 2, 2, 3, 0]
    summary = SpeculationSummary(
        policy="faser",
        drafts=len(accepted),
        verified=24,
        accepted=sum(accepted),
        accepted_per_position=tuple(sum(each > at for each in accepted) for at in range(3)),
    )
    report = acceptance(summary, 3, detailed=False)
    assert report["acceptance_histogram"] == [accepted.count(number) for number in range(4)]
    assert report["mean_acceptance_length"] == 1 + sum(accepted) / len(accepted)


def test_the_official_client_reads_it_as_an_extra_field(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("Hello!", summaries=[SUMMARY])
    messages: Any = HI
    answer = client.chat.completions.create(
        model="tiny", messages=messages, extra_body={"speculative": {"class": "gold", "max_tokens": 4}, **OWN}
    )
    assert answer.model_extra is not None
    assert answer.model_extra["metrics"]["faser"] == FASER
    stream = client.chat.completions.create(
        model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}, extra_body=OWN
    )
    *_, last = stream
    assert last.usage is not None
    assert last.model_extra is not None
    assert last.model_extra["metrics"]["speculative_decoding"] == VLLM


@pytest.mark.parametrize("policy, ending", [("faser", "-synthetic"), ("off", "")])
def test_the_fingerprint_says_when_answers_are_not_the_models(policy: str, ending: str) -> None:
    config = SpeculationConfig(
        policy=policy, rejection_sample_method="synthetic", synthetic_acceptance_rates=(0.5,) * 16
    )
    with serving(FakeEngine(), settings(speculation=config)) as url, http_client(url) as http:
        answer = http.post(CHAT, json={"messages": HI}).json()
    assert answer["system_fingerprint"] == f"faser-1.2.3{ending}"


def traced(request: Request) -> Iterator[Step]:
    """Three steps: a draft that is accepted as a whole, one that is not, and none."""
    traces = [
        StepTrace(drafter="suffix", gamma=1, accepted=1, texts=("H", "e")),
        StepTrace(drafter="ngram", gamma=3, accepted=1, texts=("l", "")),
        StepTrace(texts=("l",)),
    ]
    for at, trace in enumerate(traces):
        reason = FinishReason.LENGTH if trace is traces[-1] else None
        said = replace(delta(request, 0, ("He", "l", "l")[at].encode(), finish_reason=reason), trace=trace)
        yield RequestOutput(request_id=request.request_id, deltas=(said,))


TRACES = [
    {
        "drafter": "suffix",
        "gamma": 1,
        "accepted": 1,
        "tokens": [{"text": "H", "origin": "accepted"}, {"text": "e", "origin": "bonus"}],
    },
    {
        "drafter": "ngram",
        "gamma": 3,
        "accepted": 1,
        "tokens": [{"text": "l", "origin": "accepted"}, {"text": "", "origin": "corrected"}],
    },
    {"drafter": None, "gamma": 0, "accepted": 0, "tokens": [{"text": "l", "origin": "plain"}]},
]


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_a_traced_stream_says_of_each_step_where_its_tokens_come_from(
    http: httpx.Client, engine: FakeEngine, route: str
) -> None:
    engine.script = traced
    body = {**BODIES[route], "stream": True, "speculative": {"trace": True}}
    choices = [choice for chunk in events(http.post(route, json=body)) for choice in chunk["choices"]]
    assert [choice["trace"] for choice in choices if "trace" in choice] == TRACES
    assert engine.requests[0].speculation.trace
    engine.reset()
    http.post(route, json={**body, "speculative": {"trace": False}})
    assert not engine.requests[0].speculation.trace


@pytest.mark.parametrize(
    "route, change, problem",
    [
        (CHAT, {"stream": False}, "needs a stream of /v1/chat/completions or /v1/completions"),
        (TEXT, {"stream": None}, "needs a stream of /v1/chat/completions or /v1/completions"),
        (CHAT, {"cache_salt": None}, "would reveal other clients' answers; send a cache_salt"),
        (TEXT, {"cache_salt": None}, "would reveal other clients' answers; send a cache_salt"),
        ("/v1/responses", {"input": "hi", "messages": None}, "needs a stream of /v1/chat/completions"),
        ("/v1/messages", {"max_tokens": 9, "messages": HI}, "needs a stream of /v1/chat/completions"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_by_name(
    http: httpx.Client, engine: FakeEngine, route: str, change: dict[str, Any], problem: str
) -> None:
    body = {**BODIES.get(route, OWN), "stream": True, "speculative": {"trace": True}, **change}
    answer = http.post(route, json={name: value for name, value in body.items() if value is not None})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(f"speculative.trace is true; it {problem}")
    assert not engine.requests
