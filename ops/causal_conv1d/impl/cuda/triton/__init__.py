"""Short convolutions in Triton. Imported by the CUDA implementation alone: triton is optional."""
