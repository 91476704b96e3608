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
    "serve/instrumentator/test_metrics.py",
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
    "serve/instrumentator/test_orca_metrics.py, test_uds.py, serve/middleware": "vLLM's own flags",
}

# Parts of a test's name, with its file, to the reason.
DESELECTED: dict[str, str] = {}
