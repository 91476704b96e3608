"""FASER and other engines: the same model, prompts, clients and cores, in turn."""
