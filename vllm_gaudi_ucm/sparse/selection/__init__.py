"""The worker's side of block selection: the state on the host, and the computation on the device."""
