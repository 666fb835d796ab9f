"""The execution mode of Gaudi's bridge: eager with torch.compile, or lazy, and the build of torch that it needs."""

from typing import NamedTuple

from vllm_gaudi_ucm import envs


class HpuMode(NamedTuple):
    """The mode in PT_HPU_LAZY_MODE, and the installed torch.

    The vendor builds torch from a fork (`2.11.0a0+git...`), and supports upstream's (`2.11.0`) as well.
    """

    lazy: bool
    torch_version: str

    @property
    def is_vendors_torch(self) -> bool:
        return "+git" in self.torch_version

    def problem(self) -> str | None:
        """Returns why the bridge would not start; None if it would. Source: its own check when it is imported."""
        if not self.lazy or self.is_vendors_torch:
            return None
        return (
            f"PT_HPU_LAZY_MODE={envs.observed('PT_HPU_LAZY_MODE')}: lazy mode needs the vendor's build of torch "
            f"(a version with +git), found upstream's torch {self.torch_version}; unset PT_HPU_LAZY_MODE to compile "
            "with torch.compile, which is the default, or install the vendor's torch"
        )

    def __str__(self) -> str:
        flavour = "the vendor's build" if self.is_vendors_torch else "upstream's build"
        mode = "lazy" if self.lazy else "eager with torch.compile"
        return f"{mode}, torch {self.torch_version} ({flavour})"


def hpu_mode() -> HpuMode:
    """Returns the mode of this process, without starting a card."""
    # takes seconds, which the help of the doctor need not
    import torch

    return HpuMode(envs.lazy_mode(), torch.__version__)


def check_hpu_mode() -> None:
    """Raises RuntimeError for a mode that the installed torch cannot run in; before the bridge is imported."""
    problem = hpu_mode().problem()
    if problem is not None:
        raise RuntimeError(problem)
