"""RMSNorm with a gate, as layers with states have it."""
