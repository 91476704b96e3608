"""Which of vLLM's tests run against FASER, and why the others do not. Paths are below tests/entrypoints."""

FILES = (
    "conftest.py",
    "anthropic/test_messages.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/completion/test_completion.py",
    "openai/models/test_models.py",
    "openai/responses/conftest.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_structured_output.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
)

_OWN = "tests vLLM's own classes, without a server"
LEFT_OUT = {
    "*/test_*_conversion.py, *_error.py, *_validation.py, *_unit.py, test_serving_*.py, test_*_utils.py": _OWN,
    "openai/parser, tool_parsers, unit_tests, openai/test_render_*.py, openai/test_session_id.py": _OWN,
    "openai/completion/test_*_with_prompt_embeds.py": "FASER takes no prompt embeddings",
    "openai/completion/test_prompt_validation.py": "about prompt embeddings, and words",
    "openai/completion/test_lora_resolvers.py, serve/lora": "FASER serves no adapters",
    "openai/completion/test_tensorizer_entrypoint.py, openai/completion/test_token_in_token_out.py": "vLLM's own",
    "openai/chat_completion/test_batched_chat_completions.py": "vLLM's own route",
    "openai/chat_completion/test_completion_with_function_calling.py": "asks what Qwen3-0.6B answers",
    "openai/chat_completion/test_extra_content_fields.py, multimodal, speech_to_text": "FASER reads text only",
    "openai/chat_completion/test_thinking_token_budget.py": "FASER has no budget of thoughts",
    "openai/responses/test_harmony.py, test_mcp_tools.py, test_parsable_context.py": "needs gpt-oss or its tools",
    "openai/responses/test_stateful.py": "FASER stores no responses, and says so",
    "openai/test_openai_schema.py": "needs an image model; tests/api/test_openapi_conformance.py does the same",
    "pooling, rl, scale_out, cohere, llm, cli, launchers, generate, serve/dev, serve/sagemaker": "vLLM's own",
    "serve/instrumentator/test_metrics.py": "starts vLLM's own command; tests/metrics does the same",
    "serve/instrumentator/test_orca_metrics.py, test_uds.py, serve/middleware": "vLLM's own flags",
}

_MODEL = "asserts what its own model answers or counts"
_LAST_CHUNK = "the chunk that ends a chat's stream has an empty delta, as with OpenAI; vLLM's has the last text"
_TRANSFER = "FASER moves no KV cache between servers, and says so"
_ALL_IDS = "`logprob_token_ids` is refused by name"
_ALL = "-1 asks for the whole vocabulary; FASER gives at most 20"
_AS_IDS = "needs --return-tokens-as-token-ids, which is refused; requests may ask for the same"
_INFO = "FASER has no /tokenizer_info"
_NULLS = "asserts that a field which the request does not ask for is null; FASER leaves it out, as OpenAI does"
_REASONING = "needs a model that reasons"

# Parts of a test's name, with its file, to the reason why it does not run.
DESELECTED = {
    "test_messages.py::test_anthropic_streaming_cache_usage": "vLLM counts what it writes to its cache",
    "test_messages.py::test_anthropic_streaming": "the first event counts a token, as Anthropic's; vLLM's none",
    "test_messages.py::test_anthropic_tool_call": _MODEL,
    "test_chat.py::test_more_than_one_prompt_logprobs_chat": _MODEL,
    "test_chat.py::test_prompt_logprobs_chat[HuggingFaceH4/zephyr-7b-beta-None]": _NULLS,
    "test_chat.py::test_single_chat_session": _MODEL,
    "test_chat.py::test_chat_streaming": _LAST_CHUNK,
    "test_chat.py::test_chat_completion_stream_options": _LAST_CHUNK,
    "test_enable_force_include_usage.py": _LAST_CHUNK,
    "test_chat.py::test_structured_outputs_choice_chat": _MODEL,
    "test_chat.py::test_structured_outputs_json_chat": _MODEL,
    "test_chat.py::test_structured_outputs_regex_chat": _MODEL,
    "test_chat.py::test_response_format_json_schema": _MODEL,
    "test_chat.py::test_complex_message_content": _MODEL,
    "test_chat.py::test_long_seed": "asserts pydantic's words",
    "test_chat_completion.py::test_kv_transfer": _TRANSFER,
    "test_chat_echo.py::test_prompt_logprobs": _ALL,
    "test_chat_echo.py::test_top_logprobs": _ALL,
    "test_include_reasoning.py::test_include_reasoning_true": _REASONING,
    "test_include_reasoning.py::test_reasoning_tokens_in_usage": _REASONING,
    "test_include_reasoning.py::test_default_includes_reasoning": _REASONING,
    "test_logprob_token_ids.py::test_logprob_token_ids_returns_requested_ids": _ALL_IDS,
    "test_logprob_token_ids.py::test_logprob_token_ids_stream_with_no_top_k": _ALL_IDS,
    "test_completion.py::test_logprob_token_ids": _ALL_IDS,
    "test_completion.py::test_prompt_logprobs_completion[Qwen/Qwen3-0.6B-None]": _NULLS,
    "test_completion.py::test_single_completion": _MODEL,
    "test_completion.py::test_completion_streaming": _MODEL,
    "test_completion.py::test_parallel": _MODEL,
    "test_completion.py::test_batch_completions": "asks for beam search, which is refused by name",
    "test_messages.py::test_anthropic_structured_output": _MODEL,
    "test_chunked_prompt.py::test_chat": _LAST_CHUNK,
    "test_return_token_ids.py::test_basic_completion_with_emoji[False]": _NULLS,
    "test_return_token_ids.py::test_basic_completion_with_emoji[None]": _NULLS,
    "test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs": _MODEL,
    "test_return_tokens_as_ids.py::test_completion_return_tokens_as_token_ids_completion[True]": _AS_IDS,
    "test_return_tokens_as_ids.py::test_chat_return_tokens_as_token_ids_completion[True]": _AS_IDS,
    "test_models.py::test_check_models": "asks for an adapter's card",
    "test_basic.py::test_simple_input": _MODEL,
    "test_basic.py::test_instructions": _MODEL,
    "test_basic.py::test_chat": _MODEL,
    "test_simple.py::test_enable_response_messages": "a field of vLLM's own",
    "test_simple.py::test_reasoning_item": _REASONING,
    "test_simple.py::test_streaming_reasoning_tokens_e2e": _REASONING,
    "test_simple.py::test_non_streaming_reasoning_tokens_e2e": _REASONING,
    "test_structured_output.py": "the answer of so small a model is cut at its limit",
    "test_return_token_ids.py::test_chat_completion_with_tool_use": _MODEL,
    "test_basic.py::test_show_version": "asserts vLLM's version",
    "test_basic.py::test_request_cancellation": "asks for 10,000 tokens; the tested model has 8,192",
    "test_tokenization.py::test_tokenizer_info": _INFO,
}
