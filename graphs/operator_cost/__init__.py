"""What the operators of a region cost on a device, counted from their stream: FLOPs and bytes, never measured."""
