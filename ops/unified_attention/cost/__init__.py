"""Which way of computing a step's attention is the fastest on this device, by a linear model fitted to measurements."""
