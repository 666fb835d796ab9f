"""Swap: blocks of preempted requests wait in host memory."""
