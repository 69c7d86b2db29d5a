"""Our own experiments, on questions that the papers neither claim nor ask."""
