"""Limits of drafting from text, the same in Python and in the native index. Those of suffix look-up are vLLM's."""

MAX_CONTEXT = 24  # tokens that suffix look-up compares
DRAFT_PER_CONTEXT_TOKEN = 1.0  # a suffix draft is no longer than the context it was found by
MIN_FOLLOWING_SHARE = 0.1  # a suffix draft ends before a token that follows in fewer of the occurrences
CORPUS_TOKENS = 262_144  # of past outputs that suffix look-up remembers
