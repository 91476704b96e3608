"""Checkpoints that measurements need: widened models, noisy drafters, random GGUF files, and bfloat16 copies."""
