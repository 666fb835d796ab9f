"""Files of Intel Neural Compressor: what is read of them, and what is refused by the name of the key or the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.layers.measured_files import NODES, write_files
from vllm_gaudi_ucm.layers.measured.measurements import (
    Calibration,
    Measurements,
    Node,
    read_measurements,
    write_calibration,
)
from vllm_gaudi_ucm.layers.measured.quant_config import SCALE_METHODS, QuantConfigError, read_quant_config

DOWN = "model.layers.0.mlp.down_proj"


def read(path: Path) -> Measurements:
    return read_measurements(read_quant_config(path))


def test_a_calibration_of_vllm_gaudi(tmp_path: Path) -> None:
    """Keys of its scripts, with names as regular expressions, and keys that change no number."""
    path = write_files(
        tmp_path,
        scale_method="MAXABS_POW2",
        scale_format="scalar",
        method="HOOKS",
        blocklist={"types": ["ReplicatedLinear"], "names": ["lm_head", r"mlp\.gate\b"]},
        scale_params={"input_backoff": 0.5},
        device_for_scales="GAUDI2",
        ignore_modules_wo_measures="True",
        measure_exclude="OUTPUT",
        quantize_weight=False,
        calibration_sample_interval=1,
        use_qdq=False,
    )
    config = read_quant_config(path)
    assert (config.method.name, config.device, config.skips_unmeasured) == ("MAXABS_POW2", "GAUDI2", True)
    assert (config.method.rows_backoff, config.method.weights_backoff) == (0.5, 0.5)
    covered = [config.covers(name, "QKVParallelLinear") for name in ("a.mlp.gate", "a.mlp.gate_up_proj", "lm_head")]
    assert covered == [False, True, False]
    assert not config.covers("a.mlp.x", "ReplicatedLinear")
    assert read_measurements(config).nodes == {DOWN: Node((3.5,), weight=0.25)}


def test_older_keys_and_an_allowlist(tmp_path: Path) -> None:
    nodes = {f"_orig_mod.{DOWN}": {"input": [[[1.0], [3.0], [2.0]]], "output": [[1.0]], "params": {}}}
    lists = {"allowlist": ..., "blocklist": ..., "whitelist": {"names": ["mlp"]}, "blacklist": {"types": ["Linear"]}}
    path = write_files(tmp_path, nodes, **lists)
    config = read_quant_config(path)
    assert read(path).nodes == {DOWN: Node((3.0,))}
    assert [config.covers(name, "X") for name in ("a.mlp.b", "a.attn.b")] == [True, False]
    assert not config.covers("a.mlp.b", "Linear")


def test_ranks_become_their_maximum(tmp_path: Path) -> None:
    """The smallest complete set counts, such as a unified one of fewer ranks; lists of modules are other files."""
    path = write_files(tmp_path, ranks=4)
    rank = {"Mode": "DynamicRange", "Nodes": {DOWN: {"inputs": [[[9.0]]], "params": {"weight": [[0.5]]}}, "b": {}}}
    (tmp_path / "g3" / "inc_output_hooks_maxabs_2_4.json").write_text(json.dumps(rank))
    (tmp_path / "g3" / "inc_output_hooks_maxabs_0_4_mod_list.json").write_text("[]")
    found = read(path)
    assert (found.nodes[DOWN], found.ranks, len(found.files)) == (Node((9.0,), (), 0.5), 4, 4)
    write_files(tmp_path, ranks=2)
    assert read(path).ranks == 2
    (tmp_path / "g3" / "inc_output_hooks_maxabs_1_2.json").unlink()
    assert read(path).ranks == 4
    (tmp_path / "g3" / "inc_output_hooks_maxabs_3_4.json").unlink()
    with pytest.raises(QuantConfigError, match=r"of the ranks \[0\], expected 0 to 1; copy .*maxabs_1_2\.json"):
        read(path)


def test_scales_are_read_if_nothing_else_is_there(tmp_path: Path) -> None:
    nodes = {DOWN: {"inputs": [0.0625], "outputs": [0.5], "params": {"weight": {"0": [0.5, 0.25], "1": [1.0]}}}}
    path = write_files(tmp_path, nodes, content_mode="Scale")
    found = read(path)
    assert (found.mode, found.nodes) == ("Scale", {DOWN: Node((0.0625,), weight=0.5)})
    write_files(tmp_path)
    assert read(path).mode == "DynamicRange"


def test_outputs_of_unset_memory(tmp_path: Path) -> None:
    """Published measurements of DeepSeek-R1 and Llama 4 have such numbers for layers whose ranks are added."""
    nodes = {DOWN: {"inputs": [[[0.5]]], "outputs": [[[0.25]], [[float("nan")]]], "params": {"weight": [[0.25]]}}}
    assert read(write_files(tmp_path, nodes)).nodes == {DOWN: Node((0.5,), weight=0.25)}


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"mode": "MEASURE"}, "mode: found 'MEASURE', expected QUANTIZE or LOAD; .*gaudi-ucm calibrate"),
    ({"method": "SMOOTH"}, "method: found 'SMOOTH', expected HOOKS"),
    ({"observer": "save"}, "observer: found 'save', expected MAXABS or MAXABS_PER_CHANNEL"),
    ({"fp8_config": "E5M2"}, "fp8_config: found 'E5M2', expected E4M3"),
    ({"hp_dtype": "FP32"}, "hp_dtype: found 'FP32', expected BF16"),
    ({"fake_quant": True}, "fake_quant: found True, expected False"),
    ({"use_qdq": "true"}, "use_qdq: found 'true', expected False"),
    ({"dynamic_quantization": True}, "dynamic_quantization: found True, expected False"),
    ({"row_parallel_linear_allreduce_quantization": True}, "row_parallel_linear_allreduce_quantization: found True"),
    ({"device_for_scales": "GAUDI4"}, "device_for_scales: found 'GAUDI4', expected GAUDI2 or GAUDI3"),
    ({"scale_format": "tensor"}, "scale_format: found 'tensor', expected CONST or SCALAR"),
    ({"mod_dict": {"Mine": "linear"}}, "mod_dict: found .*Mine"),
    (
        {"scale_method": "maxabs_hw_opt_weight"},
        "scale_method: found 'maxabs_hw_opt_weight', expected one of unit_scale",
    ),
    ({"scale_method": {"default": "maxabs_hw"}}, "scale_method: found {'default'.*take maxabs_hw"),
    ({"scale_params": {"alpha": 0.5}}, r"scale_params\.alpha: found 0\.5, expected numbers above 0"),
    ({"scale_params": {"input_backoff": 0}}, r"scale_params\.input_backoff: found 0, expected numbers above 0"),
    ({"scale_params": [1]}, r"scale_params: found \[1\], expected an object"),
    ({"dump_stats_path": ""}, "dump_stats_path: found '', expected the beginning of files' names"),
    ({"blocklist": ["lm_head"]}, "blocklist: found .*expected an object with"),
    ({"blocklist": {"names": "lm_head"}}, r"blocklist\.names: found 'lm_head', expected a list of words"),
    ({"blocklist": {"names": ["("]}}, r"blocklist\.names: found '\(', expected a regular expression"),
    ({"blacklist": {"names": []}}, "blacklist: found .*expected one of blocklist and blacklist"),
    ({"weight_bits": 4}, "weight_bits: found 4, expected one of the keys .*dump_stats_path"),
    ({"manifest_version": 1}, "it is the manifest of a calibration; name the file maxabs_quant_"),
]


@pytest.mark.parametrize(("config", "refused"), CONFIGS, ids=[next(iter(config)) for config, _ in CONFIGS])
def test_keys_that_are_refused(tmp_path: Path, config: dict[str, Any], refused: str) -> None:
    path = write_files(tmp_path, **config)
    with pytest.raises(QuantConfigError, match=refused) as error:
        read_quant_config(path)
    assert str(path) in str(error.value)


def rewrite(path: Path, change: Callable[[Path], None]) -> None:
    change(path.parent / "g3" / "inc_output_hooks_maxabs_0_1.json")


def pickled(file: Path) -> None:
    """As INC writes it, a pickled dictionary: its JSON was not copied."""
    np.savez(file.with_suffix(".npz"), {"Nodes": {}})
    file.unlink()


FILES: list[tuple[Callable[[Path], object], str]] = [
    (pickled, r"inc_output_hooks_maxabs_0_1\.npz without its JSON file; .*pickled"),
    (lambda file: file.unlink(), "dump_stats_path: found '/elsewhere/model/g3/inc_output', expected the beginning of"),
    (lambda file: file.rename(file.with_name("inc_output_hooks_shape.json")), r"found inc_output_hooks_shape\.json"),
    (lambda file: file.write_text("{"), r"inc_output_hooks_maxabs_0_1\.json: it is not JSON"),
    (lambda file: file.write_bytes(b"\xff\xfe{"), "it is not JSON"),
    (lambda file: file.write_text("[" * 100000), "it is not JSON"),
    (lambda file: file.write_text("[]"), "found list, expected a JSON object"),
    (lambda file: file.write_text('{"Mode": "Scale", "Nodes": {}}'), "Mode: found 'Scale', expected 'DynamicRange'"),
    (lambda file: file.write_text('{"Mode": "DynamicRange", "Nodes": {}}'), "Nodes: found none"),
    (lambda file: file.write_text('{"Mode": "DynamicRange", "Nodes": {"a": 1}}'), r"Nodes\.a: found int"),
    (
        lambda file: file.write_text('{"Mode": "DynamicRange", "Nodes": {"a": {"inputs": [[[NaN]]]}}}'),
        r"Nodes\.a\.inputs: found nan, expected finite numbers",
    ),
    (
        lambda file: file.write_text('{"Mode": "DynamicRange", "Nodes": {"a": {"params": {"weight": ["x"]}}}}'),
        r"Nodes\.a\.params\.weight: found 'x', expected finite numbers",
    ),
]


@pytest.mark.parametrize(("change", "refused"), FILES, ids=[refused[:24] for _, refused in FILES])
def test_files_that_are_refused(tmp_path: Path, change: Callable[[Path], Any], refused: str) -> None:
    path = write_files(tmp_path)
    rewrite(path, change)
    with pytest.raises(QuantConfigError, match=refused):
        read(path)


def test_a_quant_config_that_is_no_file(tmp_path: Path) -> None:
    for path, refused in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(QuantConfigError, match=rf"QUANT_CONFIG {path}: {refused}"):
            read_quant_config(path)


def test_where_files_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the working directory, as INC does, or to the configuration; names may have patterns' characters."""
    path = write_files(tmp_path / "a", dump_stats_path="g3/inc_output")
    assert read(path).ranks == 1
    monkeypatch.chdir(tmp_path)
    other = write_files(tmp_path / "b[1]", dump_stats_path="a/g3/inc_output")
    assert read(other).files[0].resolve() == (tmp_path / "a" / "g3" / "inc_output_hooks_maxabs_0_1.json").resolve()
    (tmp_path / "b[1]" / "g3" / "inc_output_hooks_maxabs_0_1.json").rename(
        tmp_path / "b[1]" / "x[0]_hooks_maxabs_0_1.json"
    )
    moved = write_files(tmp_path / "c", dump_stats_path="/gone/x[0]")
    moved.rename(tmp_path / "b[1]" / "quant.json")
    assert read(tmp_path / "b[1]" / "quant.json").nodes[DOWN].weight == 0.25


def test_what_is_written_is_read(tmp_path: Path) -> None:
    nodes = {DOWN: Node((3.5,), (2.0, 2.5), 0.25), "model.layers.0.self_attn.attn.impl.k_cache": Node((1.5,))}
    path = write_calibration(Calibration(tmp_path / "model", "g2", nodes, ("lm_head",)))
    config = read_quant_config(path)
    assert (path.name, config.device, config.blocked.names) == ("maxabs_quant_g2.json", "GAUDI2", ("lm_head",))
    assert read_measurements(config).nodes == {name: node._replace(outputs=()) for name, node in nodes.items()}
    assert json.loads((path.parent / "g2" / "inc_output_hooks_maxabs_0_1_mod_list.json").read_text()) == list(nodes)
    assert json.loads((path.parent / "g2" / "inc_output_hooks_maxabs_0_1.json").read_text())["Nodes"][DOWN] == {
        "inputs": [[[3.5]]],
        "outputs": [[[2.0]], [[2.5]]],
        "params": {"weight": [[0.25]]},
    }


def test_methods_are_named_in_the_guide() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "quantisation.md").read_text(encoding="utf-8")
    assert [name for name in SCALE_METHODS if f"`{name.lower()}`" not in text] == []
    assert NODES
