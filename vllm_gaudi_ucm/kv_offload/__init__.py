"""KV offload (memory mode): blocks of a sparse request's context that are unlikely to be chosen leave the device, and come back."""
