"""RMSNorm with a gate on a GPU."""
