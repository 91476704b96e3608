"""FASER: an OpenAI-compatible LLM serving engine that manages speculative decoding per request and per step."""
