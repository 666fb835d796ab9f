"""The gated activation of a decoder layer."""
