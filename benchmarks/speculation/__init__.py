"""Drafts and policies: acceptance, look-ups, pruning, overlap, distilled heads, and the time of deciding."""
