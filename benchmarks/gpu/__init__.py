"""What FASER does on a CUDA device: checks first, then times, each beside the least that memory allows."""
