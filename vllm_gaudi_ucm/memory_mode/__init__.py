"""KV offload (memory mode): blocks of a context that are unlikely to be chosen leave the device, and come back."""
