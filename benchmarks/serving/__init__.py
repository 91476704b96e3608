"""A running server: start-up, memory, fairness, privacy, hostile clients, and what views cost."""
