"""The modelled cost of steps on a device."""
