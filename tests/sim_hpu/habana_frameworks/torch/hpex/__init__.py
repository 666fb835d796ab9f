"""The bridge's extra kernels. Dynamo follows these wrappers, as the bridge's own, into the operators that they call."""

from pathlib import Path

from habana_frameworks.torch.dynamo.inlining import inline_when_called
from habana_frameworks.torch.hpu import sdp

_HERE = Path(__file__).parent
inline_when_called(str(_HERE / "kernels.py"), str(_HERE / "normalization.py"), sdp.__file__)
