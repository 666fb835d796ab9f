"""What steps cost on a device, modelled."""
