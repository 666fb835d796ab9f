"""Packaging: maps the top-level folders `ops/` and `graphs/` into the package `vllm_gaudi_ucm`."""

from setuptools import find_packages, setup

# `ops` and `graphs` stand at the top of the repository so that their independence of vLLM is visible, but they must
# never become global modules: they are installed under the package only.
ROOMS = ("ops", "graphs")

packages = find_packages(include=["vllm_gaudi_ucm", "vllm_gaudi_ucm.*"])
for room in ROOMS:
    packages += [f"vllm_gaudi_ucm.{room}"] + [f"vllm_gaudi_ucm.{room}.{sub}" for sub in find_packages(room)]

setup(
    packages=packages,
    package_dir={"vllm_gaudi_ucm": "vllm_gaudi_ucm", **{f"vllm_gaudi_ucm.{room}": room for room in ROOMS}},
)
