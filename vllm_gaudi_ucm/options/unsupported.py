"""Errors for what this version does not support: a feature of the engine, or a parameter of one request."""


class UnsupportedFeatureError(NotImplementedError):
    """A feature that a flag or a model asked for and that this plugin does not compute.

    Not a ValueError: pydantic, which runs our checks while it builds vLLM's configuration, would wrap one into a report
    of its own, and our sentence would not be the last line.
    """

    def __init__(self, feature: str, asked_by: str) -> None:
        remedy = "remove the flag" if asked_by.startswith("--") else "choose another model, or remove the flag"
        super().__init__(
            f"vllm-gaudi-ucm does not support {feature} (asked for by {asked_by}); {remedy}. "
            "README.md lists what is supported."
        )
        self.feature = feature


class UnsupportedRequestError(ValueError):
    """A sampling parameter that would be ignored; the server answers the request with it and goes on."""

    def __init__(self, parameter: str) -> None:
        super().__init__(f"vllm-gaudi-ucm does not support the sampling parameter {parameter}; leave it out.")
