"""Whether speculation leaves the target's answers alone: their law by chi-square, their tokens one by one."""
