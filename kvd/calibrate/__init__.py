"""How much a KV precision costs, measured on real text: `kvd calibrate`, and what a load makes of its result."""
