"""The gated activation in Triton. Imported by the CUDA implementation alone: triton is optional."""
