"""The start of a worker: what is measured, compiled and made once, before the first step."""
