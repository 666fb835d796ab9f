"""GSA's prefetch engine: KV blocks from a store to host memory and on to the device, before they are needed."""
