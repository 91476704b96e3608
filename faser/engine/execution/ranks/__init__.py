"""Several processes that each hold a part of one model (tensor parallelism).

Rank 0 is the engine. It tells the other ranks what its runner does, and they do the same with their parts:

    rank 0      scheduler ─▶ executor ─▶ LeadingRunner ─▶ layers ─▶ logits ─▶ sampler
                                              │ calls      ↕ sums     ↑ parts
    rank 1 …                               follow     ─▶ layers ─▶ logits

So nothing above the runner knows of ranks, and only rank 0 decides, samples and drafts. Start with relay.py, then
group.py (how ranks talk), meeting.py (how they meet), roll_call.py (which one hangs); in startup/ leader.py (how
rank 0 starts the others), follower.py (their process) and rank.py (what it runs).
"""
