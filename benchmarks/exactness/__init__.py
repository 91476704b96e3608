"""That answers are right: distributions, tokens of real models, schemas, and hashes to compare two commits by."""
