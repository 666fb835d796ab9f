"""The start of a worker: measurements, compilations and objects made once, before the first step."""
