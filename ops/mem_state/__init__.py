"""Which slots of a KV cache are free, as a tensor on the device: taking slots and giving them back at static shapes."""
