"""Packaging: maps the top-level folders `ops/` and `graphs/` into the package `vllm_gaudi_ucm`, and compiles the native
CPU kernels into the wheel if there is a compiler.

`pip wheel . -C--build-option=--kernel-levels=none` compiles none. The default, auto, compiles for all levels of CPUs if
that can be done; all, or names separated by commas, must succeed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import CompileError, OptionError

ROOT = Path(__file__).resolve().parent
# `ops` and `graphs` stand at the top of the repository so that their independence of vLLM is visible, but they must
# never become global modules: they are installed under the package only.
ROOMS = ("ops", "graphs")

packages = find_packages(include=["vllm_gaudi_ucm", "vllm_gaudi_ucm.*"])
for room in ROOMS:
    packages += [f"vllm_gaudi_ucm.{room}"] + [f"vllm_gaudi_ucm.{room}.{sub}" for sub in find_packages(room)]


def import_levels() -> ModuleType:
    """The module `ops/cpu/native/levels.py` of this folder, which needs nothing but Python's own library."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    import vllm_gaudi_ucm

    if str(ROOT) not in vllm_gaudi_ucm.__path__:
        vllm_gaudi_ucm.__path__.append(str(ROOT))
    from vllm_gaudi_ucm.ops.cpu.native import levels

    return levels


class Wheel(bdist_wheel):
    """Compiles kernels first. A wheel that has some is tagged for its platform and every Python 3: ctypes calls them.

    kernel_levels: auto, all, none, or names of levels separated by commas.
    """

    user_options: ClassVar = [
        *bdist_wheel.user_options,
        ("kernel-levels=", None, "CPUs to compile for: auto (all if possible; default), all, none, or some by name"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.kernel_levels = "auto"

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


class BuildKernels(Command):
    """Compiles kernels into the folder of the build."""

    description = "compile the native CPU kernels for levels of x86-64 CPUs"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None  # an editable install sets it

    def finalize_options(self) -> None:
        # not of the finished command, which asks this one whether it is to be tagged
        _, self.asked = self.distribution.get_option_dict("bdist_wheel").get("kernel_levels", ("", "auto"))
        known = [level.name for level in import_levels().LEVELS]
        self.names = {"auto": known, "all": known, "none": []}.get(self.asked, self.asked.split(","))
        if unknown := sorted(set(self.names) - set(known)):
            expected = f"auto, all, none, or some of {','.join(known)}"
            raise OptionError(f"--kernel-levels: found {','.join(unknown)}, expected {expected}")

    def why_none(self) -> str:
        """Why nothing is compiled, in words; empty if something is."""
        if self.editable_mode or not self.names:
            return "none were asked for"
        return str(import_levels().why_not_buildable())

    def run(self) -> None:
        why = self.why_none() or self.compile()
        if why and self.names and self.asked != "auto" and not self.editable_mode:
            raise CompileError(f"--kernel-levels={self.asked}: {why}")
        if why:
            self.announce(f"native CPU kernels are not compiled now but on first use: {why}", level=3)

    def compile(self) -> str:
        """Returns why it failed, in words; empty if it did not."""
        levels = import_levels()
        chosen = [level for level in levels.LEVELS if level.name in self.names]
        folder = Path(
            self.get_finalized_command("build_py").build_lib, "vllm_gaudi_ucm", "ops", "cpu", "native", "portable"
        )
        self.announce(f"compiling native CPU kernels for {', '.join(level.name for level in chosen)}", level=3)
        try:
            levels.build_levels(folder, chosen)
        except levels.build.BuildError as error:
            return str(error)
        return ""

    def get_source_files(self) -> list[str]:
        return []  # they are package data

    def get_outputs(self) -> list[str]:
        return []  # the whole folder of the build is installed

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_kernels", None)]


class WithKernels(Distribution):
    """A distribution of one platform if kernels are compiled, else of any."""

    def has_ext_modules(self) -> bool:
        command = self.get_command_obj("build_kernels")
        command.ensure_finalized()
        return not command.why_none()


setup(
    packages=packages,
    package_dir={"vllm_gaudi_ucm": "vllm_gaudi_ucm", **{f"vllm_gaudi_ucm.{room}": room for room in ROOMS}},
    distclass=WithKernels,
    cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": Wheel},
)
