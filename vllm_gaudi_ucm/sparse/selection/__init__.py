"""The worker's side of block selection: what the host keeps, and what runs on the device."""
