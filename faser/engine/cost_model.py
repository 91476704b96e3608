"""The cost model: what a step takes, in seconds, by the rows it has. Control plane, no torch.

Owns a measured table per role, the slope for KV tokens read, and a factor per role that follows the machine
online. Does not measure: `profile` in the data plane fills the tables, the engine reports what steps took.
"""
