"""What the cards of models advise on sampling, for models whose generation_config.json says nothing about it."""

from collections.abc import Mapping

# By the name of the model's folder. At temperature 1, the default of the OpenAI API, models this small drift off.
CARD_ADVICE: Mapping[str, Mapping[str, float]] = {
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, section "How to use"
    "SmolLM2-135M-Instruct": {"temperature": 0.2, "top_p": 0.9},
}
