"""Whether Python runs inside of a function that torch.compile has compiled, between two of its graphs."""

import sys
from types import FrameType

import torch._compile
import torch._dynamo.eval_frame

_EVAL_FRAME = torch._dynamo.eval_frame.__file__
_COMPILED = frozenset({"compile_wrapper"})
_DISABLED = "_fn"
_TRACING = frozenset({"convert_frame.py", "symbolic_convert.py", "guards.py", "output_graph.py", "aot_autograd.py"})


def _is_internal(caller: FrameType | None) -> bool:
    """torch disables its own functions lazily, such as those that call modes, through this module."""
    return caller is not None and caller.f_code.co_filename == torch._compile.__file__


def is_in_compiled_call(start: FrameType | None = None) -> bool:
    """Whether the nearest of dynamo's frames below is a compiled function's, not a disabled one's or its tracer's."""
    frame = start or sys._getframe(1)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file == _EVAL_FRAME:
            if name in _COMPILED:
                return True
            if name == _DISABLED and not _is_internal(frame.f_back):
                return False
        elif file.startswith(torch._dynamo.__path__[0]) and file.rpartition("/")[2] in _TRACING:
            return False
        frame = frame.f_back
    return False
